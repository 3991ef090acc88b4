"""Ways to run cells: ``local`` processes, ``inline`` (in this process, for tests), ``ray`` (an existing cluster)."""

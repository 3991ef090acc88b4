"""Records to statistics, tables and figures; needs no torch and nothing else of the project.

    python -m analysis.make --records runs/quick --out paper_figs/quick

Three verbs: ``records`` reads what ran, ``stats`` and ``compare`` turn paired seeds into intervals, ``tables`` and
``figures`` show them. The same records give the same bytes.
"""

"""The ablation harness: grids, workloads, one trainer for all arms, run folders, executors, search and publishing."""

"""What order and work in progress do: studies by simulation, with the control code and policies of a run.

    python -m benchmarks.scheduling                   the short version, less than a minute
    python -m benchmarks.scheduling.regimes           modes x policies, by what is the bottleneck
    python -m benchmarks.scheduling.oscillation       why steps alternate, and what stops it
    python -m benchmarks.scheduling.work_in_progress  staleness against speed
    python -m benchmarks.scheduling.bounds            hard staleness bounds
    python -m benchmarks.scheduling.predictors        what a better length predictor is worth
    python -m benchmarks.scheduling.published         the ratios of the ASP paper

Each writes a table, `figures/<name>.png` and `benchmarks/results/scheduling_<name>.json`.
"""

"""The test harness: one test body for virtual and real ranks, one verdict for all ranks of a job.

`plugin` is what pytest loads. Under a launcher (`mpirun -n 4 pytest`) it adds `verdict`, which makes the ranks agree
on every report through `job`, the harness's own view of the ranks. `time_limit` ends tests that hang. `launch` starts
such jobs from a test, whose processes read `dist-packages` first.
"""

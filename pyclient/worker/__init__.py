"""The worker: claims what is due, runs handlers, reports what became of them, and survives the rest.

options       what the command line asked for
link          a connection that comes back
claiming      what to claim, when to sleep, when to wake
running       handlers, one after the other in each slot
reporting     results to the database in batches, kept until it has them
leases        a thread that keeps leases alive and notices what was lost, also while the event loop is blocked
process       one worker process: all of the above, its signals, its end
supervisor    starts processes and replaces those that die
"""

from pyclient.worker.options import Options
from pyclient.worker.process import Worker
from pyclient.worker.supervisor import supervise

__all__ = ["Options", "Worker", "supervise"]

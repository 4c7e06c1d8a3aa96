"""Two processes: one serves a suffix, others have its prefix, and run and train across the line between them.

Halves and addresses flow in; a server, and remotes that stand for it, flow out. Messages are data: JSON and the bytes of
boundaries. It needs pyzmq, the extra `remote`. The files, in import order::

    message        headers and bodies, errors and generators as data
    facts          what a side says of itself, and whether two go together
    link           sockets of ZeroMQ, with limits
    keys           who may come
    plain          optimizers, schedulers and losses as they are typed
    counters       counters and a log
    checkpoint     a half and its optimizer at one step, as a file
    together       a step by gradients that lie in two processes
    trained        a training run on the server: each request done once
    merged         boundaries that wait as one run
    server         the loop
    calls          requests, sent until their replies are there
    steps          requests with numbers, and the step on both sides
    client         the suffix as it is called from elsewhere
    edge           the loss on the edge: three parts, the one between two cuts elsewhere
    training       a run that goes on from checkpoints of both sides
"""

from ariadne.remote.calls import Pending
from ariadne.remote.client import Remote, connect
from ariadne.remote.edge import Edge
from ariadne.remote.keys import make as make_key
from ariadne.remote.server import Limits, Server, serve, until_told
from ariadne.remote.training import Training

__all__ = ["Edge", "Limits", "Pending", "Remote", "Server", "Training", "connect", "make_key", "serve", "until_told"]

"""Training through parameter servers: workers push gradients and pull parameters, servers run the optimizer.

`Server` is one server's process, `ParameterClient` a worker's way to all servers, and `ParameterServerOptimizer` an
optimizer that uses it. Needs the extra hvdx[parameter-server].
"""

from __future__ import annotations

from hvdx.distribute.parameter_server.client import ParameterClient
from hvdx.distribute.parameter_server.hook import ParameterServerOptimizer
from hvdx.distribute.parameter_server.placement import Placement, place
from hvdx.distribute.parameter_server.server import Server, serve
from hvdx.distribute.parameter_server.states import State

__all__ = ["ParameterClient", "ParameterServerOptimizer", "Placement", "Server", "State", "place", "serve"]

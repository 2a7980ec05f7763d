"""A worker process of an endpoint agent: it runs a function that blocks, each call in a thread.

Messages are lines of JSON on a socket: {number, fields} from the controller, {number, reward} or {number, error} back.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from typing import Any

from meshrl.process.guard import fork_below_guard


def main(fd: int, path: str) -> None:
    fork_below_guard()
    from meshrl.agent.endpoint.programs import keywords
    from meshrl.core.lookup import import_object
    from meshrl.reward.replies import error_line

    sending = threading.Lock()
    link = socket.socket(fileno=fd)
    function = import_object(path)

    def work(number: int, fields: dict[str, Any]) -> None:
        try:
            answer: dict[str, Any] = {"number": number, "reward": function(**keywords(function, fields))}
            line = json.dumps(answer)
        except BaseException as error:  # the user's code: it may raise anything, also sys.exit()
            line = json.dumps({"number": number, "error": error_line(error)})
        with sending:
            link.sendall(line.encode() + b"\n")

    with link, link.makefile("rb") as lines:
        for line in lines:
            task = json.loads(line)
            threading.Thread(target=work, args=(task["number"], task["fields"]), daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

"""Programs that try to do harm in isolation, and what becomes of them. The table of docs/tools.md is generated from
it; tests/unit/process/test_isolation.py runs each."""

from __future__ import annotations

from typing import NamedTuple


class Attack(NamedTuple):
    """text: the program. printed: what its output has; "" = any. fault: what it ends with; "" = its exit code is 0.
    outcome: for the page."""

    name: str
    text: str
    printed: str
    fault: str
    outcome: str


KILLED = "it was killed after 2 s"
ATTACKS = [
    Attack(
        "a fork bomb",
        "import os, time\nn = 0\ntry:\n    while n < 200:\n        if os.fork() == 0:\n            time.sleep(30)\n"
        "        n += 1\nexcept OSError:\n    print(n < 16)",
        "True",
        "",
        "at most 16 processes, also for root; the others are refused, and all end with the program",
    ),
    Attack(
        "a memory bomb",
        "x = bytearray(1 << 34)",
        "MemoryError",
        "exit code 1",
        "at most 512 MiB of address space in each process: `MemoryError`",
    ),
    Attack(
        "a memory bomb in temporary files",
        "for n in range(8):\n    open(f'/tmp/{n}', 'wb').write(bytes(1 << 22))",
        "No space left on device",
        "exit code 1",
        "at most 16 MiB in `/tmp`, which is in memory and ends with the program",
    ),
    Attack(
        "a large file",
        "open('/tmp/a', 'wb').truncate(1 << 25)",
        "File too large",
        "exit code 1",
        "at most 16 MiB",
    ),
    Attack(
        "many open files",
        "files = [open('/tmp/a', 'w') for _ in range(1000)]",
        "Too many open files",
        "exit code 1",
        "at most 64",
    ),
    Attack(
        "output without end",
        "while True:\n    print('x' * 1000)",
        "xxx",
        "it was killed after 65536 bytes of output",
        "killed after 64 KiB",
    ),
    Attack(
        "a loop without end",
        "while True:\n    pass",
        "",
        KILLED,
        "killed after `agent.args.tool_timeout_s`, or 30 s of CPU time",
    ),
    Attack(
        "a hang in C",
        "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
        "",
        KILLED,
        "killed after `agent.args.tool_timeout_s`",
    ),
    Attack(
        "signals masked and ignored",
        "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
        "for n in (1, 2, 3, 15):\n    signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)",
        "",
        KILLED,
        "killed all the same",
    ),
    Attack(
        "a child that outlives the program, in a session of its own",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\n"
        "    os._exit(0)\nprint('done')",
        "done",
        "",
        "ends with the program",
    ),
    Attack(
        "zombies",
        "import os, time\nfor _ in range(10):\n    if os.fork() == 0:\n        os._exit(0)\nprint('done')",
        "done",
        "",
        "end with the program",
    ),
    Attack(
        "keys in the environment",
        "import os\nprint(sorted({*os.environ} - {'PATH', 'PWD', 'LC_CTYPE'}))\n"
        "print(b'SECRET' in b''.join(open(f'/proc/{p}/environ', 'rb').read() for p in os.listdir('/proc')\n"
        "      if p.isdigit() and os.access(f'/proc/{p}/environ', os.R_OK)))",
        "[]\nFalse",
        "",
        "the environment is `PATH` alone",
    ),
    Attack(
        "the network and loopback",
        "import socket\nfor address in (('127.0.0.1', PORT), ('10.0.0.1', 80)):\n    try:\n"
        "        socket.create_connection(address, 1)\n        print('connected')\n"
        "    except OSError:\n        print('refused')",
        "refused\nrefused",
        "",
        "there is none: no server of the run can be reached",
    ),
    Attack(
        "reading files of the user",
        "import os\nfor path in ('FOLDER', os.path.expanduser('~root/.bashrc'), '/home', '/etc/shadow', '/var'):\n"
        "    try:\n        os.stat(path)\n        print('found', path)\n    except OSError:\n        pass",
        "",
        "",
        "home, run folder, `/etc` and `/var` do not exist; `/usr` and Python's folder are read-only",
    ),
    Attack(
        "writing outside",
        "import os\nprint(all(os.statvfs(path).f_flag & os.ST_RDONLY for path in ('/', '/dev', '/usr')))\n"
        "for path in ('/a', '/dev/a', '/dev/shm/a', '/usr/a', '/proc/sys/kernel/hostname', 'FOLDER/a'):\n    try:\n"
        "        open(path, 'w').write('a')\n        print('wrote', path)\n    except OSError:\n        pass",
        "True",
        "",
        "only `/tmp` can be written",
    ),
    Attack(
        "processes and memory of others",
        "import os\nprint([p for p in os.listdir('/proc') if p.isdigit() and int(p) > 3])\n"
        "try:\n    open(f'/proc/{os.getppid()}/mem', 'rb')\n    print('opened')\nexcept OSError:\n    print('refused')",
        "[]\nrefused",
        "",
        "it sees its own processes alone",
    ),
    Attack(
        "becoming root",
        "import os\nprint(os.getuid() != 0 or open('/proc/self/uid_map').read().split()[2] == '1')\n"
        "for line in open('/proc/self/status'):\n    if line.startswith(('CapEff', 'NoNewPrivs')):\n"
        "        print(line.split()[1])",
        "True\n0000000000000000\n1",
        "",
        "another user without capabilities, which can gain none",
    ),
    Attack(
        "ending with success at once",
        "import os\nos._exit(0)",
        "",
        "",
        "no success: a reward must read what the program printed, with a word that the program can't know",
    ),
]


def table() -> str:
    return "\n".join(
        ["| a program tries | outcome |", "| --- | --- |", *(f"| {a.name} | {a.outcome} |" for a in ATTACKS)]
    )

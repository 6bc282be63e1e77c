"""Starts replicas of a script, and a new one for each that is killed, as an agent on each node of a cluster does.

    python keep_going.py --replicas 3 train_elastic.py --steps 60

What a replica prints gets the seconds since the start and its name in front. When this ends, all replicas end.
On several nodes each has an agent of its own, which starts one of them: --only 2.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

BEGAN = time.monotonic()
CARD = "lo0" if sys.platform == "darwin" else "lo"  # gloo listens there: no other machine can connect


def say(line):
    print(f"{time.monotonic() - BEGAN:.3f} {line}", flush=True)


def start(number, args, meet):
    """A replica, and a thread that hands on what it says."""
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": CARD, **os.environ}
    options = [f"--name=r{number}", f"--replicas={args.replicas}", f"--meet={meet}", *args.options]
    replica = subprocess.Popen([sys.executable, args.script, *options], stdout=subprocess.PIPE, text=True, env=env)
    say(f"r{number} pid {replica.pid}")
    replica.said = threading.Thread(target=follow, args=(replica, number), daemon=True)
    replica.said.start()
    return replica


def follow(replica, number):
    for line in replica.stdout:
        say(f"r{number} {line.rstrip()}")


def main(args):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    replicas = {}
    with tempfile.TemporaryDirectory() as folder:  # of mode 700
        meet = args.meet or folder
        try:
            for number in range(args.replicas) if args.only is None else [args.only]:
                replicas[number] = start(number, args, meet)
            while replicas:
                time.sleep(0.02)
                for number, replica in list(replicas.items()):
                    if replica.poll() is None:
                        continue
                    if os.path.isdir(meet):  # the others need not wait for it
                        Path(meet, f"gone-r{number}-{replica.pid}").touch()
                    replica.said.join()
                    if replica.returncode > 0:
                        sys.exit(f"r{number} ended with status {replica.returncode}")
                    del replicas[number]
                    if replica.returncode < 0:
                        say(f"r{number} was killed by signal {-replica.returncode}")
                        replicas[number] = start(number, args, meet)
        finally:
            for replica in replicas.values():
                replica.kill()
                replica.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--meet", help="a folder of this user alone, in which replicas agree; default: a new one")
    parser.add_argument("--only", type=int, metavar="N", help="start replica N alone: others have other agents")
    parser.add_argument("script")
    parser.add_argument("options", nargs=argparse.REMAINDER)
    main(parser.parse_args())

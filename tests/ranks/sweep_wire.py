"""Every wire against the oracle at every split of ranks into nodes: `python -m tests.ranks.sweep_wire`; minutes."""

import sys
import time

from tests.ranks.launch_wire import run_wire_ranks

WIRES = (
    "tcp",
    "tcp:threads=2,arena_kib=1,ring=4",
    "paced:gbps=2,latency_us=20,reorder_us=200,delay_words=0.1,repeat_words=0.1,threads=2,ring=2,arena_kib=4",
)


def main() -> None:
    for num_ranks in (1, 2, 3, 4, 7):
        for num_nodes in (1, 2, 4):
            per_node = -(-num_ranks // num_nodes)
            if num_nodes > num_ranks or -(-num_ranks // per_node) != num_nodes:
                continue
            for wire in WIRES if num_nodes > 1 else WIRES[:1]:
                start_s = time.monotonic()
                run_wire_ranks(
                    num_ranks,
                    "tests.ranks.cases_wire:exchange",
                    wire=wire,
                    extra_env={"EPRT_RANKS_PER_NODE": str(per_node)},
                    num_nodes=num_nodes,
                    num_configs=8,
                    num_epochs=100,
                )
                print(f"{num_ranks} ranks, {num_nodes} nodes, {wire}: same bits, {time.monotonic() - start_s:.0f} s")
                sys.stdout.flush()


if __name__ == "__main__":
    main()

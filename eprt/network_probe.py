"""What is wrong with this machine's network cards, and the remedy. Part of `eprt env` (probe.py).

Knows nothing of how cards are found (network_cards.py).
"""

from eprt.network_cards import NEARNESS, Bond, NetworkCards, NetworkPort

_FAST_GBPS = 25.0  # slower ports are for management: nobody sends tokens over them


def summary(cards: NetworkCards) -> str:
    """One line."""
    parts = [_describe(port, cards) for port in cards.ports]
    for bond in cards.bonds:
        up = sum(is_up for is_up, _ in bond.uplinks.values())
        parts.append(f"{bond.name}: {up} of {len(bond.uplinks)} uplinks up ({bond.mode})")
    return "; ".join(parts) or "no card on a bus"


def find_problems(cards: NetworkCards) -> list[tuple[str, str]]:
    """(what, remedy) of each. A port that is down is only a problem where others of its model are up."""
    found = []
    for port in cards.ports:
        found += _of_port(port, cards)
    for bond in cards.bonds:
        found += _of_bond(bond)
    return found + _far_gpus(cards)


def slower_ports(cards: NetworkCards) -> dict[str, float]:
    """Ports that are up, but slower than the fastest of their model here -> their share of its speed: slow cards, whose
    every link is slow, unlike a slow link between two cards that are right."""
    slow = {}
    for port in cards.ports:
        fastest = max((each.gbps or 0.0 for each in _siblings(port, cards)), default=0.0)
        if port.is_up and port.gbps and port.gbps < fastest:
            slow[port.name] = port.gbps / fastest
    return slow


def _siblings(port: NetworkPort, cards: NetworkCards) -> list[NetworkPort]:
    return [
        each
        for each in cards.ports
        if each.is_up and not each.is_virtual and (each.model, each.kind) == (port.model, port.kind)
    ]


def _describe(port: NetworkPort, cards: NetworkCards) -> str:
    speed = f" {port.gbps:g} Gbit/s" if port.gbps else ""
    words = [f"{port.name} {port.kind}{speed} {'up' if port.is_up else 'down'}"]
    if port.interfaces and port.interfaces != (port.name,):
        words.append("/".join(port.interfaces))
    if port.numa_node is not None:
        words.append(f"NUMA {port.numa_node}")
    if port.is_virtual:
        words.append("virtual function")
    if port.num_virtual:
        words.append(f"{port.num_virtual} virtual functions")
    nearest = port.nearest()
    if nearest is not None:
        names = [f"{i}" for i, gpu in enumerate(cards.gpus) if port.near.get(gpu) == nearest]
        words.append(f"GPU {','.join(names)} {nearest}")
    return ", ".join(words)


def _of_port(port: NetworkPort, cards: NetworkCards) -> list[tuple[str, str]]:
    found = []
    siblings = [each for each in _siblings(port, cards) if each.name != port.name]
    if not port.is_up and siblings:
        others = ", ".join(each.name for each in siblings)
        found.append(
            (
                f"port {port.name} is down ({port.state}), while {others} of the same model are up",
                "look at the cable and the switch's port; `ibstat`, or `ethtool` with the interface, says more",
            )
        )
    if (share := slower_ports(cards).get(port.name)) is not None and port.gbps:
        found.append(
            (
                f"port {port.name} runs at {port.gbps:g} Gbit/s, {share:.0%} of the fastest port of its model here",
                "look at the cable, and at the speed that the switch's port is set to",
            )
        )
    if port.pcie and port.pcie.share < 1 and not port.is_virtual and (port.gbps or 0) >= _FAST_GBPS:
        link = port.pcie
        found.append(
            (
                f"port {port.name} has PCIe {link.gts:g} GT/s x{link.width} and could have {link.max_gts:g} GT/s "
                f"x{link.max_width}",
                f"look at the slot, its settings in the firmware, and `lspci -vv -s {port.address}` (LnkSta)",
            )
        )
    return found


def _of_bond(bond: Bond) -> list[tuple[str, str]]:
    down = [name for name, (is_up, _) in bond.uplinks.items() if not is_up]
    speeds = {name: gbps for name, (is_up, gbps) in bond.uplinks.items() if is_up and gbps}
    found = []
    if not bond.uplinks:
        found.append((f"bond {bond.name} has no uplink", f"`ip link set INTERFACE master {bond.name}`"))
    for name in down:
        found.append((f"uplink {name} of {bond.name} is down", "look at its cable and the switch's port"))
    if len(set(speeds.values())) > 1:
        said = ", ".join(f"{name} {gbps:g}" for name, gbps in speeds.items())
        found.append((f"the uplinks of {bond.name} have different speeds: {said} Gbit/s", "give both the same speed"))
    return found


def _far_gpus(cards: NetworkCards) -> list[tuple[str, str]]:
    """GPUs all of whose fast cards are behind another NUMA node."""
    fast = [port for port in cards.ports if port.is_up and port.near and (port.gbps or 0) >= _FAST_GBPS]
    if not fast:
        return []
    far = [
        str(i)
        for i, gpu in enumerate(cards.gpus)
        if min((port.near[gpu] for port in fast), key=NEARNESS.index) == "SYS"
    ]
    if not far:
        return []
    what = f"every fast card is on another NUMA node than GPU {', '.join(far)}"
    return [(what, "use a card near each GPU, or expect less than the card's speed from these GPUs")]

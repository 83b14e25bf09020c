"""ServerKeys: who may call what: the keys of clients and of administrators. Knows nothing of HTTP."""

import hmac
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ServerKeys:
    """The keys of one server. Without client keys every request under /v1 is served."""

    clients: tuple[str, ...] = ()  # open /v1
    admins: tuple[str, ...] = ()  # open /v1, and what changes the server
    tier_of_key: dict[str, str] = field(default_factory=dict)  # of clients' keys that have a tier of service

    def opens_v1(self, key: str) -> bool:
        return not self.clients or _is_among(key, self.clients + self.admins)

    def opens_admin(self, key: str) -> bool:
        return _is_among(key, self.admins)

    def tier_name(self, key: str) -> str | None:
        """Of the key's tier; None: the key opens all."""
        names = [name for each, name in self.tier_of_key.items() if _is_among(key, (each,))]
        return names[0] if names and not self.opens_admin(key) else None


def _is_among(key: str, keys: tuple[str, ...]) -> bool:
    """Takes as long for a wrong key as for a right one."""
    given = key.encode(errors="surrogateescape")
    return any([hmac.compare_digest(given, each.encode()) for each in keys])


NO_KEYS = ServerKeys()

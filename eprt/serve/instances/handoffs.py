"""Handoffs: sequences on their way between instances, and what becomes of them when something ends.

    computed    a prefill instance has the sequence, until it has sent a token and then Held
    offered     a decode instance has the sequence, and pulls its pages; the prefill instance holds them
    running     it has all pages: StartAdopted; the prefill instance lets its pages go

The client gets each token as it comes, whoever sent it. What goes wrong ends in one of two ways: the decode instance
computes the prompt and the tokens so far itself (the pages cannot be read, or came too late), or the sequence begins
again elsewhere behind what its client has (an instance is lost). Draws depend on seed and position alone, so its tokens
stay the same. Knows nothing of HTTP; who is there is fleet.py's to say.
"""

import logging
import time
from dataclasses import dataclass, field

from msgspec.structs import replace

from eprt.kv.reader import HeldPages
from eprt.serve.errors import ApiError
from eprt.serve.instances.chooser import Chooser
from eprt.serve.instances.instance import Instance
from eprt.serve.ranks import messages as msg
from eprt.serve.ranks.rank import Rank
from eprt.serve.ranks.sequences import RunningSequence

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Offer:
    """A sequence whose pages one instance holds and another one pulls."""

    request_id: str
    source: Instance
    source_rank: int
    target: Instance
    target_rank: int
    held: HeldPages
    since_s: float = field(default_factory=time.monotonic)


def _with_address(held: HeldPages, holder: Rank, reader: Rank) -> HeldPages:
    """The pages, where the reader finds them: at the address at which their holder, or else the reader, came here."""
    if held.source.address is None:
        return held
    if holder.is_far:
        host, *_ = holder.transport.get_extra_info("peername")
    elif reader.is_far:
        host, *_ = reader.transport.get_extra_info("sockname")
    else:
        return held  # both are here
    address = host, held.source.address[1]
    return replace(held, source=replace(held.source, address=address))


@dataclass(slots=True)
class HandoffCounts:
    """Since the start."""

    num_done: int = 0  # requests that went on in another instance
    num_pulled: int = 0  # pages that were copied for that
    num_shared: int = 0  # pages that the other instance's prefix cache had
    num_failed: int = 0  # whose pages could not be used
    num_late: int = 0  # whose pages were not read in time
    num_replayed: int = 0  # sequences of lost instances that began again elsewhere
    wait_s: float = 0.0  # from Held to StartAdopted, of all that were done


class Handoffs:
    """Of one server.

    Args:
        timeout_s: how long pages are held.
        max_running: sequences that a rank computes at once.
    """

    def __init__(self, chooser: Chooser, timeout_s: float, max_running: int):
        self._chooser, self._timeout_s, self._max_running = chooser, timeout_s, max_running
        self.offers: dict[str, Offer] = {}  # by request id
        self.counts = HandoffCounts()

    # -- from the ranks --

    def on_held(self, instance: Instance, rank: Rank, message: msg.Held) -> None:
        """A prefill instance holds pages."""
        sequence = instance.pool.sequences.take_out(message.request_id)
        if sequence is None:  # its client has left meanwhile
            rank.send(msg.AbortRequest(message.request_id))
            return
        if sequence.first_token_s is not None and sequence.num_ahead:
            instance.rate.add_prompt(sequence.num_ahead, sequence.first_token_s - sequence.started_s)
        sequence.num_ahead = 0
        self._offer(sequence, instance, rank.rank, message.held)

    def _offer(self, sequence: RunningSequence, source: Instance, source_rank: int, held: HeldPages) -> None:
        request_id = sequence.request.request_id
        token_ids = [*sequence.request.prompt_token_ids, *sequence.generated]
        target = self._chooser.choose_decode(token_ids, sequence.generation.tier)
        if target is None:  # it goes on where it is, whose prefix cache has its pages
            source.pool.ranks[source_rank].send(msg.AbortRequest(request_id))
            self._begin(sequence, source)
            return
        if self._displaces(sequence, target):
            source.pool.ranks[source_rank].send(msg.AbortRequest(request_id))
            self._begin(sequence, target)
            return
        rank, request = target.pool.sequences.take_in(sequence, numbered=False)
        self.offers[request_id] = Offer(request_id, source, source_rank, target, rank, held)
        holder, reader = source.pool.ranks[source_rank], target.pool.ranks[rank]
        reader.send(msg.Adopt(request, _with_address(held, holder, reader)))

    def _displaces(self, sequence: RunningSequence, target: Instance) -> bool:
        """Whether it must take the place of sequences of tiers behind its own. A sequence whose pages arrive waits for
        a row behind all that arrived before; one that is computed there displaces by priority."""
        tier, backlog = sequence.generation.tier, target.forecast.backlog
        is_full = min(target.pool.router.num_requests) >= self._max_running
        return tier is not None and is_full and any(other > tier.rank for other in backlog.tiers_there())

    def on_arrived(self, instance: Instance, message: msg.Arrived) -> None:
        """A decode instance has pulled the pages, or cannot use them."""
        offer = self.offers.get(message.request_id)
        if offer is None or offer.target is not instance:  # it came too late, or its client has left
            return
        self._end_offer(offer)
        if message.error:
            self.counts.num_failed += 1
            _log.warning("%s computes a request itself whose pages %s held: %s", instance, offer.source, message.error)
            self._compute_there(offer)
            return
        self.counts.num_done += 1
        self.counts.num_pulled += message.num_pulled
        self.counts.num_shared += len(offer.held.all_pages) - message.num_pulled
        self.counts.wait_s += time.monotonic() - offer.since_s
        pool = instance.pool
        seq = pool.next_seq()
        for member in pool.members:
            starts = member.rank == offer.target_rank
            member.send(msg.StartAdopted(seq, offer.request_id) if starts else msg.Wake(seq))

    def _end_offer(self, offer: Offer) -> None:
        """The pages are not needed any more."""
        del self.offers[offer.request_id]
        if offer.source.lives:
            offer.source.pool.ranks[offer.source_rank].send(msg.AbortRequest(offer.request_id))

    def _compute_there(self, offer: Offer) -> None:
        sequence = offer.target.pool.sequences.take_out(offer.request_id)
        if sequence is not None:
            self._begin(sequence, offer.target)

    def _begin(self, sequence: RunningSequence, instance: Instance, hands_over: bool = False) -> None:
        """The instance computes the sequence's prompt and the tokens that its client has, and goes on."""
        instance.pool.send_numbered([instance.pool.sequences.take_in(sequence, hands_over=hands_over)])

    # -- what ends --

    def drop_offer(self, request_id: str) -> None:
        """The sequence has ended."""
        if (offer := self.offers.get(request_id)) is not None:
            self._end_offer(offer)

    def give_up_late(self) -> None:
        """Pages that were held for too long are let go."""
        now_s = time.monotonic()
        for offer in list(self.offers.values()):
            if now_s - offer.since_s > self._timeout_s:
                self.counts.num_late += 1
                self._end_offer(offer)
                offer.target.pool.ranks[offer.target_rank].send(msg.AbortRequest(offer.request_id))
                self._compute_there(offer)

    def move_from(self, instance: Instance) -> int:
        """All sequences of an instance that takes part no more go on elsewhere, and fail where nobody is left. How many
        go on."""
        num_moved = 0
        for request_id in instance.pool.sequences.request_ids():
            sequence = instance.pool.sequences.take_out(request_id)
            assert sequence is not None, f"{request_id} was among them"
            offer = self.offers.pop(request_id, None)
            if instance.lives:  # it is told to leave
                instance.pool.ranks[sequence.rank].send(msg.AbortRequest(request_id))
            sequence.num_ahead = 0
            if offer is not None and offer.source.lives:
                self._offer(sequence, offer.source, offer.source_rank, offer.held)
            elif not self._begin_elsewhere(sequence):
                continue
            num_moved += 1
            sequence.generation.num_moved += 1
        self.counts.num_replayed += num_moved
        return num_moved

    def _begin_elsewhere(self, sequence: RunningSequence) -> bool:
        """False where no instance is left: then the request has failed."""
        token_ids = [*sequence.request.prompt_token_ids, *sequence.generated]
        chosen = self._chooser.choose_any(token_ids, tier=sequence.generation.tier)
        if chosen is None:
            sequence.generation.fail(ApiError(500, "no instance is left; the request was lost", code="rank_lost"))
            return False
        self._begin(sequence, *chosen)
        return True

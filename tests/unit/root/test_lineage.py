"""Track the lineage: parents, forks, and checkpoints that must be full whatever the policy."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.examples import examples
from torchrec_checknrun import Consecutive, Full, Intermittent, OneShot
from torchrec_checknrun.format.manifest import Manifest, TableTotals
from torchrec_checknrun.format.names import sequence_of
from torchrec_checknrun.policy import Decision, Policy
from torchrec_checknrun.root.chain import Chain
from torchrec_checknrun.root.lineage import Lineage, Proposal

EXACT = 32
POLICIES: list[Policy] = [Full(), OneShot(), Consecutive(), Intermittent()]


class Run:
    """A process that saves with a lineage as a Checkpointer does."""

    def __init__(self, policy: Policy, sequence: int = 0) -> None:
        self.policy = policy
        self.lineage = Lineage()
        self.sequence = sequence
        self.step = 0

    def propose(self, bits: int | None = None) -> Proposal:
        self.step += 10
        self.sequence += 1
        widths = {"t": bits or EXACT}
        return self.lineage.propose(self.policy, bits, widths, self.step, self.sequence, 1)

    def save(self, bits: int | None = None) -> Manifest:
        manifest = commit(self.propose(bits))
        self.lineage.committed(manifest)
        return manifest


def commit(proposal: Proposal, rows: int = 5) -> Manifest:
    header = proposal.header
    assert header.sequence is not None
    lossy = header.bits is not None and rows > 0
    table = TableTotals(
        100,
        8,
        value_bits=header.bits if header.bits and rows else EXACT,
        error_rows=rows if lossy else 0,
    )
    return Manifest(
        id=proposal.id,
        sequence=header.sequence,
        step=header.step,
        kind=header.kind,
        parent=header.parent,
        previous=header.previous,
        world_size=1,
        created_at="",
        created_by="",
        lossy_restores=header.lossy_restores,
        bits=header.bits,
        tables={"t": table},
        states={},
        dense_bytes=0,
        files=(),
        earlier_fractions=header.earlier_fractions,
    ).sealed()


def chain_of(head: Manifest, known: list[Manifest]) -> Chain:
    by_id = {manifest.id: manifest for manifest in known}
    chain = [head]
    while (parent := chain[-1].parent) is not None:
        chain.append(by_id[parent.id])
    return Chain(tuple(reversed(chain)))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_is_full(policy: Policy) -> None:
    run = Run(policy)
    assert run.lineage.chain_length == 0
    proposal = run.propose()
    assert proposal.decision is Decision.FULL
    assert proposal.header.kind == "full"
    assert proposal.header.parent is None
    assert proposal.header.previous is None
    assert (proposal.header.step, proposal.header.sequence) == (10, 1)
    assert sequence_of(proposal.id) == 1
    assert run.lineage.history == ()


def test_a_checkpoint_names_its_writer_and_lineage() -> None:
    run = Run(Full())
    header = run.lineage.propose(Full(), None, {"t": EXACT}, 10, 1, epoch=7).header
    assert (header.epoch, header.lineage) == (7, run.lineage.id)


@pytest.mark.parametrize("forks", [False, True])
def test_only_a_run_that_goes_on_holds_what_it_restored(forks: bool) -> None:
    """After a return to an older checkpoint, one of the same step says that the run goes on."""
    run, again = Run(Full()), Run(Full())
    saved = replace(run.save(), lineage=run.lineage.id).sealed()
    again.lineage.restored(Chain((saved,)), converted=False, forks=forks)
    assert (again.lineage.id == saved.lineage) is not forks
    assert again.lineage.holds(saved.step, {"t": EXACT}) is not forks
    assert not again.lineage.holds(saved.step + 1, {"t": EXACT})


def test_ids_are_of_one_attempt_only() -> None:
    run = Run(Full())
    proposals = [run.lineage.propose(Full(), None, {"t": EXACT}, 10, 1, 1) for _ in range(20)]
    assert len({proposal.id for proposal in proposals}) == 20


def test_full_has_no_parent() -> None:
    run = Run(Full())
    first, second = run.save(), run.save()
    assert (second.kind, second.parent, second.previous) == ("full", None, first.link)
    assert run.lineage.history == (second,)
    assert run.lineage.chain_length == 1


def test_one_shot_builds_on_the_baseline() -> None:
    run = Run(OneShot())
    full, second, third = run.save(), run.save(), run.save()
    assert second.kind == third.kind == "differential"
    assert second.parent == third.parent == full.link
    assert third.previous == second.link
    assert run.lineage.chain_length == 2


def test_consecutive_builds_on_the_previous() -> None:
    run = Run(Consecutive())
    full, second, third = run.save(), run.save(), run.save()
    assert (second.parent, third.parent) == (full.link, second.link)
    assert run.lineage.history == (full, second, third)
    assert run.lineage.chain_length == 3


@pytest.mark.parametrize("policy", [OneShot(), Consecutive()])
def test_a_checkpoint_that_was_not_committed_is_nobodys_parent(policy: Policy) -> None:
    run = Run(policy)
    first_try = run.propose()
    assert run.propose().decision is Decision.FULL
    full = run.save()
    assert full.id != first_try.id
    lost = run.propose()
    kept = run.save()
    assert kept.parent == kept.previous == full.link
    assert kept.id != lost.id
    assert run.lineage.chain_length == 2


@pytest.mark.parametrize("policy", [OneShot(), Consecutive()])
def test_a_restored_run_goes_on_with_its_chain(policy: Policy) -> None:
    run = Run(policy)
    saved = [run.save(), run.save(), run.save()]
    head = saved[-1]
    restarted = Run(policy, sequence=3)
    restarted.lineage.restored(chain_of(head, saved), converted=False, forks=False)
    assert restarted.lineage.chain_length == run.lineage.chain_length
    following = restarted.save()
    expected = saved[0] if isinstance(policy, OneShot) else head
    assert (following.parent, following.previous) == (expected.link, head.link)


def test_falling_back_starts_a_fork() -> None:
    run = Run(Consecutive())
    full, second, abandoned = run.save(), run.save(), run.save()
    run.lineage.restored(Chain((full, second)), converted=False, forks=False)
    fork = run.save()
    assert fork.parent == fork.previous == second.link
    assert fork.sequence > abandoned.sequence
    assert run.lineage.history == (full, second, fork)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_converting_restore_needs_a_full_checkpoint(policy: Policy) -> None:
    run = Run(policy)
    full = run.save()
    run.lineage.restored(Chain((full,)), converted=True, forks=False)
    assert run.propose().decision is Decision.FULL
    again = run.save()  # the previous proposal failed: this one must be full, too
    assert again.kind == "full"
    assert again.previous == full.link
    assert run.propose().decision is policy.decide(run.lineage.history)


@pytest.mark.parametrize("policy", POLICIES)
def test_other_columns_need_a_full_checkpoint(policy: Policy) -> None:
    run = Run(policy)
    run.save()
    run.lineage.force_full()
    assert run.propose().decision is Decision.FULL
    assert run.save().kind == "full"  # the previous proposal failed
    assert run.propose().decision is policy.decide(run.lineage.history)
    run.lineage.force_full()
    run.lineage.restored(
        Chain(run.lineage.history), converted=False, forks=False
    )  # restored with the same columns
    assert run.propose().decision is policy.decide(run.lineage.history)


@pytest.mark.parametrize("policy", [OneShot(), Consecutive()])
@pytest.mark.parametrize(
    ("before", "now", "kind"),
    [
        (None, None, "differential"),
        (8, 8, "differential"),
        (8, 4, "differential"),
        (None, 2, "differential"),
        (4, 8, "full"),
        (2, None, "full"),
        (8, None, "full"),
    ],
)
def test_a_rise_in_width_needs_a_full_checkpoint(
    policy: Policy, before: int | None, now: int | None, kind: str
) -> None:
    """Write all rows again: others would silently keep their loss."""
    run = Run(policy)
    run.save(before)
    run.save(before)
    assert run.save(now).kind == kind
    assert run.save(now).kind == "differential"


@pytest.mark.parametrize("policy", [OneShot(), Consecutive()])
def test_a_rise_after_a_fall(policy: Policy) -> None:
    """Take the narrowest checkpoint's width for a chain's, also from the middle of a chain."""
    run = Run(policy)
    kinds = [run.save(bits).kind for bits in (8, 4, 4, 8, 8)]
    assert kinds == ["full", "differential", "differential", "full", "differential"]


@pytest.mark.parametrize("policy", [OneShot(), Consecutive(), Intermittent()])
def test_a_decision_takes_no_longer_in_a_long_chain(policy: Policy) -> None:
    """Look only at the chain's ends, since training waits."""

    class Between:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was asked for")

    run = Run(policy)
    for bits in (8, 4, 4):
        run.save(bits)
    first, *_, last = run.lineage.history
    between: Any = Between()
    run.lineage.history = (first, between, between, last)
    assert run.propose(4).header.kind == "differential"
    assert run.propose(8).header.kind == "full"


def test_a_width_that_no_row_was_stored_in_does_not_count() -> None:
    run = Run(Consecutive())
    run.save(None)
    run.lineage.committed(commit(run.propose(4), rows=0))
    assert run.save(None).kind == "differential"


def test_restores_from_lossy_checkpoints_are_counted() -> None:
    run = Run(OneShot())
    exact = run.save()
    run.lineage.restored(Chain((exact,)), converted=False, forks=False)
    assert run.lineage.lossy_restores == 0
    lossy = run.save(8)
    assert lossy.lossy_restores == 0
    run.lineage.restored(Chain((exact, lossy)), converted=False, forks=False)
    assert run.lineage.lossy_restores == 1
    second = run.save(8)
    assert second.lossy_restores == 1
    third = run.save(8)
    assert third.lossy_restores == 1
    run.lineage.restored(Chain((exact, third)), converted=False, forks=False)
    assert run.lineage.lossy_restores == 2
    # Another process continues the count of the checkpoint.
    other = Run(OneShot())
    other.lineage.restored(Chain((exact, third)), converted=False, forks=False)
    assert other.lineage.lossy_restores == 2
    # Falling back to a checkpoint before the loss forgets the loss.
    other.lineage.restored(Chain((exact,)), converted=False, forks=False)
    assert other.lineage.lossy_restores == 0


def test_a_loss_in_the_middle_of_a_chain_counts() -> None:
    run = Run(Consecutive())
    first = run.save()
    lossy = run.save(8)
    last = replace(commit(run.propose(8), rows=0))
    run.lineage.restored(Chain((first, lossy, last)), converted=False, forks=False)
    assert run.lineage.lossy_restores == 1


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["save", "fail", "restore", "convert", "restart"]),
        st.sampled_from([None, 8, 4]),
        st.integers(0, 100),
    ),
    max_size=25,
)


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from(POLICIES), ACTIONS)
def test_any_history_keeps_chains_complete(
    policy: Policy, actions: list[tuple[str, int | None, int]]
) -> None:
    """Keep chains complete in any sequence of events; never mix forks, never keep a loss."""
    run = Run(policy)
    saved: list[Manifest] = []
    state: Manifest | None = None  # origin of the model's state
    for action, bits, choice in actions:
        if action in ("restore", "convert", "restart") and saved:
            if action == "restart":
                run.lineage = Lineage()
            state = saved[choice % len(saved)]
            run.lineage.restored(chain_of(state, saved), converted=action == "convert", forks=False)
        elif action == "fail":
            run.propose(bits)
        elif action == "save":
            manifest = run.save(bits)
            assert manifest.previous == (state.link if state else None)
            if manifest.parent is not None:
                assert state is not None
                chain = chain_of(manifest, [*saved, manifest])
                assert manifest.parent in [m.link for m in chain_of(state, saved).manifests]
                assert [m.sequence for m in chain.manifests] == sorted(
                    {m.sequence for m in chain.manifests}
                )
                assert chain.widths == {"t": bits or EXACT}
                assert run.lineage.chain_length == len(chain.manifests)
                assert not isinstance(policy, Full)
                assert not isinstance(policy, OneShot) or len(chain.manifests) == 2
            saved.append(manifest)
            state = manifest


def test_a_table_of_more_bits_than_it_is_stored_in_needs_a_full_checkpoint() -> None:
    lineage = Lineage()
    lineage.committed(commit(lineage.propose(OneShot(), 4, {"t": 4}, 1, 1, 1)))
    for widths, kind in (
        ({"t": 4}, "differential"),
        ({"t": 3}, "differential"),
        ({"t": 8}, "full"),
    ):
        assert lineage.propose(OneShot(), 4, widths, 2, 2, 1).header.kind == kind
    assert lineage.propose(OneShot(), 4, {"t": 4, "new": 8}, 2, 2, 1).header.kind == "differential"


def test_sizes_since_the_last_full_checkpoint_go_from_manifest_to_manifest() -> None:
    run = Run(OneShot())
    saved = [run.save() for _ in range(4)]
    assert [len(manifest.earlier_fractions) for manifest in saved] == [0, 0, 1, 2]
    restarted = Run(OneShot(), sequence=4)
    restarted.lineage.restored(Chain((saved[0], saved[2])), converted=False, forks=False)
    assert len(restarted.save().earlier_fractions) == 2
    restarted.policy = Full()
    assert restarted.save().earlier_fractions == ()

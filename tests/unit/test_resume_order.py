"""Resumption order: places, spread prefills, suspects last and alone."""

from __future__ import annotations

from cog_triton.serving.resume_order import ResumeOrder
from cog_triton.serving.ticket import MAX_DEATHS, Ticket


def stays(order: ResumeOrder, count: int, exposed: int = 0) -> list[Ticket]:
    """Requests in the engine that died: all wait, the first `exposed` of them as suspects."""
    made = [
        Ticket(number=number, epoch=order.epoch, exposed=number < exposed)
        for number in range(count)
    ]
    order.died(made)
    for stay in reversed(made):
        order.add(stay)
    return made


def test_prefills_are_spread_in_order_of_arrival() -> None:
    order = ResumeOrder()
    made = stays(order, 6)
    assert order.next_turns() == made[:4]
    assert order.next_turns() == []
    assert order.holds
    order.proven(made[2])
    assert order.next_turns() == [made[4]]
    order.remove(made[0])
    assert order.next_turns() == [made[5]]
    assert not order.holds


def test_suspects_go_last_and_alone() -> None:
    order = ResumeOrder()
    made = stays(order, 5, exposed=2)
    assert order.next_turns() == made[2:]
    for stay in made[2:4]:
        order.proven(stay)
        assert order.next_turns() == []
    order.proven(made[4])
    assert order.next_turns() == [made[0]]
    assert order.holds
    order.proven(made[0])
    assert order.next_turns() == [made[1]]
    assert order.holds
    order.remove(made[1])
    assert not order.holds


def test_a_death_counts_for_those_that_were_in_the_engine_alone() -> None:
    order = ResumeOrder()
    made = stays(order, 2, exposed=2)
    (first,) = order.next_turns()
    first.exposed, first.epoch = True, order.epoch
    assert [stay.blamed for stay in made] == [0, 0], "there were two"
    order.died(made)
    assert [stay.blamed for stay in made] == [1, 0]
    order.add(first)
    assert order.next_turns() == [made[1]], "who was blamed goes last"
    order.proven(made[1])
    assert order.next_turns() == [made[0]]
    order.proven(made[0])
    assert (made[0].blamed, made[0].suspect) == (0, False)


def test_nobody_is_blamed_for_a_death_that_others_may_have_caused() -> None:
    order = ResumeOrder()
    only = Ticket()
    for _ in range(2 * MAX_DEATHS):
        only.exposed = True
        order.died([only], blame=False)
        only.exposed = True
        order.lost([only], 0, blame=False)
    assert only.blamed == 0
    assert only.suspect, "it goes on alone in prefill all the same"


def test_the_verdict_needs_a_death_alone_in_the_engine() -> None:
    order = ResumeOrder()
    made = stays(order, 3, exposed=1)
    (suspect, *others) = made
    assert order.next_turns() == others, "after the first death it goes last"
    for stay in others:
        order.proven(stay)
    assert order.next_turns() == [suspect]
    for stay in made:
        stay.exposed, stay.epoch = stay is suspect, order.epoch
    order.died(made)
    assert suspect.blamed == MAX_DEATHS - 1
    for stay in made:
        order.add(stay)
    assert order.next_turns() == [suspect], "first, and no other beside it"
    assert order.holds
    suspect.exposed, suspect.epoch = True, order.epoch
    others[0].epoch = order.epoch
    order.remove(others[0])  # as if it had been in the engine, too
    order.died(made)
    assert suspect.blamed == MAX_DEATHS - 1, "it was not alone"
    order.add(suspect)
    assert order.next_turns() == [suspect]
    suspect.exposed, suspect.epoch = True, order.epoch
    order.died(made)
    assert (suspect.blamed, suspect.suspected) == (MAX_DEATHS, MAX_DEATHS + 1)
    order.proven(suspect)
    assert (suspect.blamed, suspect.suspected) == (0, 0)


def test_without_a_death_they_wait_until_the_engine_was_found_well() -> None:
    order = ResumeOrder()
    stay = Ticket(exposed=True)
    order.add(stay)
    assert order.next_turns() == []
    assert not order.holds
    order.release()
    assert not stay.exposed
    assert order.next_turns() == [stay]


def test_a_lost_request_holds_the_others_until_the_engine_was_found_well() -> None:
    order = ResumeOrder()
    (suspect, *others) = stays(order, 3, exposed=1)
    suspect.blamed = MAX_DEATHS - 1
    assert order.next_turns() == [suspect]
    suspect.exposed, suspect.epoch = True, order.epoch
    order.add(suspect)
    assert order.next_turns() == [], "it may be of a death that nobody knows of yet"
    order.died([suspect, *others])
    assert suspect.blamed == MAX_DEATHS, "lost before the death was known, it was in the engine"
    order.remove(suspect)
    order.release()
    assert order.next_turns() == others


def test_who_hears_of_a_death_after_the_restart_goes_on_at_once() -> None:
    order = ResumeOrder()
    late = Ticket(epoch=order.epoch, exposed=True)
    order.died([late])
    order.add(late)
    assert order.next_turns() == [late]


def several(order: ResumeOrder, *engines: int, exposed: int = 0) -> list[Ticket]:
    """Requests in several engines, the first `exposed` of them without a token."""
    return [
        Ticket(number=number, epoch=order.epoch, exposed=number < exposed, replica=engine)
        for number, engine in enumerate(engines)
    ]


def test_the_death_of_one_of_several_engines_concerns_its_requests_alone() -> None:
    order = ResumeOrder()
    made = several(order, 0, 1, 0, 1, exposed=2)
    order.lost(made, 0)
    assert [stay.blamed for stay in made] == [1, 0, 0, 0]
    assert [stay.exposed for stay in made] == [False, True, False, False]
    assert order.next_turns() == []
    for stay in (made[2], made[0]):
        order.add(stay)
    assert order.next_turns() == [made[2]], "at once, and the suspect later"
    order.proven(made[2])
    assert order.next_turns() == [made[0]]


def test_requests_that_were_interrupted_before_the_death_is_known_go_on_with_it() -> None:
    order = ResumeOrder()
    made = several(order, 0, 0, 1)
    order.add(made[0])
    order.add(made[2])  # lost on its way, and its engine is well
    assert order.next_turns() == []
    order.lost(made, 0)
    assert order.next_turns() == [], "the other one's engine may be dead"
    order.remove(made[2])
    order.add(made[1])
    order.release()
    assert order.next_turns() == [made[0], made[1]]


def test_who_goes_on_at_another_engine_is_lost_with_that() -> None:
    order = ResumeOrder()
    made = several(order, 0, 1)
    order.lost(made, 0)
    order.add(made[0])
    assert order.next_turns() == [made[0]]
    made[0].epoch, made[0].replica, made[0].exposed = order.epoch, 1, True
    order.lost(made, 0)  # the successor of the one that died
    assert (made[0].exposed, made[0].blamed) == (True, 0)
    order.lost(made, 1)
    assert (made[0].exposed, made[0].blamed, made[1].blamed) == (False, 1, 0)


def test_a_killer_is_caught_though_others_run_beside_it() -> None:
    order = ResumeOrder()
    killer, *others = made = several(order, 0, 0, 1, 1, exposed=1)
    for engine in (0, 1, 0):
        order.lost(made, engine)
        order.add(killer)
        for _ in range(2):
            for stay in order.next_turns():
                stay.epoch, stay.exposed, stay.replica = order.epoch, True, 1 - engine
    assert killer.blamed == MAX_DEATHS
    assert not any(stay.blamed for stay in others)

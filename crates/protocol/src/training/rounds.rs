//! DiLoCo: the schedule of the rounds, and what lasts from one attempt at a round to the next.
//!
//! The outer gradient is made once a round, from the state of that round. A lost attempt is repeated with the same one, since with delay or
//! eager updates the parameters have moved on; a commit, or another state, ends it.
//!
//! A state that was taken over holds inner steps of its source, which the source sends itself. They leave the local parameters before any other round
//! is sent ([`Rounds::drops_inherited`], [`Rounds::is_copy`]), so that no replica's work counts twice (INV-4).

use ftcore::{Result, Step};

use super::{Due, Integrity, RoundRules, Schedule, Sends};

/// The rounds of a run. `G` is the outer gradient of one round.
#[derive(Debug)]
pub struct Rounds<G> {
    schedule: Schedule,
    /// The outer gradient of the round in flight, and its step.
    kept: Option<(Step, G)>,
    locals: Locals,
    integrity: Integrity,
}

/// Whose inner steps the local parameters hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Locals {
    /// This replica's own.
    Own,
    /// The source's: they were just taken over.
    Inherited,
    /// The source's in the fragment of the round in flight, which this replica healed into.
    Copy,
}

impl<G> Rounds<G> {
    /// A run that has not begun.
    pub fn new(rules: RoundRules) -> Self {
        Self {
            schedule: Schedule::new(rules),
            kept: None,
            locals: Locals::Own,
            integrity: Integrity::default(),
        }
    }

    /// Errors: `InvalidState` if the state is of no step.
    pub fn check_state(&self) -> Result<()> {
        self.integrity.check()
    }

    /// Errors: `InvalidState` before `begin`, or if the state is of no step.
    pub fn check_begun(&self) -> Result<()> {
        self.integrity.check()?;
        self.schedule.check_begun()
    }

    /// Errors: `InvalidState` where a saved run cannot be taken up any more.
    pub fn may_restore(&self) -> Result<()> {
        self.integrity.check()?;
        self.schedule.may_restore()
    }

    /// A saved run was taken up at `step`, with the outer gradient of a round in flight or without. `is_copy` as it was when it was saved.
    pub fn restored(&mut self, step: Step, gradient: Option<G>, is_copy: bool) {
        self.schedule.restored(step, gradient.is_some());
        self.locals = if is_copy { Locals::Copy } else { Locals::Own };
        self.kept = gradient.map(|gradient| (step, gradient));
    }

    /// Joins the job. Once what is due is done, [`begun`](Self::begun) follows. Errors: `InvalidState` if the run has begun.
    pub fn begin(&mut self) -> Result<()> {
        self.integrity.check()?;
        self.schedule.begin()
    }

    /// `begin` got through.
    pub fn begun(&mut self) {
        self.schedule.begun();
    }

    /// Counts an inner step. Errors: `InvalidState` before `begin`, after the last round, after `finish`, and if the state is of
    /// no step. If something is still due from before it, it is not counted.
    pub fn inner_step(&mut self) -> Result<()> {
        self.integrity.check()?;
        self.schedule.inner_step()
    }

    /// What has to be done before the next inner step.
    pub fn due(&self) -> Option<Due> {
        self.schedule.due()
    }

    /// True if something is due after the next inner step.
    pub fn next_step_syncs(&self) -> bool {
        let mut next = self.schedule;
        next.inner_step().is_ok() && next.due().is_some()
    }

    /// Inner steps made in the current round, for a replica that heals from here, or (`own`) for this one, which goes on from a saved state.
    pub fn count(&self, own: bool) -> u64 {
        if own {
            self.schedule.own_count()
        } else {
            self.schedule.count()
        }
    }

    /// True if the quorum that a replica at `step` asks for next is that of the run's last step: the closing round has no data, as that of
    /// step 0, which is the first.
    pub fn is_last(&self, step: Step) -> bool {
        step > Step(0) && !self.schedule.has_data(step)
    }

    /// True once all rounds with data are done.
    pub fn is_finished(&self) -> bool {
        self.schedule.is_finished()
    }

    /// The members of the quorum for `step`, whose state this replica has now, close the run with it. The training loop here may not have decided so.
    pub fn closes_with(&mut self, step: Step) {
        self.schedule.closes_with(step);
    }

    /// There is a quorum for `step`: what goes out in it. Errors: `InvalidState` if a state was taken over in part: with that no rank goes on, not
    /// even to lose the vote (INV-5).
    pub fn joined(&mut self, step: Step) -> Result<Sends> {
        self.integrity.check()?;
        self.schedule.joined(step);
        if !self.schedule.has_data(step) {
            self.kept = None;
            return Ok(Sends::Nothing);
        }
        self.kept = self.kept.take().filter(|(of, _)| *of == step);
        Ok(match self.kept {
            Some(_) => Sends::Again,
            None => Sends::Fresh,
        })
    }

    /// Keeps the outer gradient that was made for `step`.
    pub fn keep(&mut self, step: Step, gradient: G) {
        self.kept = Some((step, gradient));
    }

    /// The outer gradient of the round in flight.
    pub fn kept(&self) -> Option<&G> {
        self.kept.as_ref().map(|(_, gradient)| gradient)
    }

    /// The outer gradient of the round in flight, which has committed.
    pub fn take_kept(&mut self) -> Option<G> {
        self.kept.take().map(|(_, gradient)| gradient)
    }

    /// The round of the quorum's step was handed to the group.
    pub fn sent(&mut self) {
        self.schedule.sent();
    }

    /// The round did not commit: it is done again at once, with the same outer gradient.
    pub fn lost(&mut self) {
        self.schedule.lost();
    }

    /// The round was committed, and its result applied or not. The step has advanced by then: what goes wrong leaves a state of no step.
    pub fn applied<T>(&mut self, outcome: Result<T>) -> Result<T> {
        let outcome = self.integrity.record(outcome)?;
        self.kept = None;
        self.locals = Locals::Own;
        self.schedule.committed();
        Ok(outcome)
    }

    /// A part of the state was written, or could not be.
    pub fn written<T>(&mut self, outcome: Result<T>) -> Result<T> {
        self.integrity.record(outcome)
    }

    /// Another state was written over this one, or a part of it; in it so many inner steps of the round are made. Errors: `InvalidState` if a part: a
    /// spare does not ask again with that.
    pub fn loaded(&mut self, count: u64, outcome: Result<()>) -> Result<()> {
        self.kept = None;
        self.integrity
            .record(outcome)
            .or_else(|_| self.integrity.check())?;
        self.locals = Locals::Inherited;
        self.schedule.replaced(count);
        Ok(())
    }

    /// True once after another state was taken over, before the first inner step with it: the local parameters of all fragments but that of the round
    /// in flight are to be set to the global ones. The source sends the inner steps in them.
    pub fn drops_inherited(&mut self) -> bool {
        let inherited = self.locals == Locals::Inherited;
        if inherited {
            self.locals = Locals::Copy;
        }
        inherited
    }

    /// True while the round in flight is one that this replica healed into: its outer gradient is a copy, and its fragment takes the global parameters
    /// wholly when it commits.
    pub fn is_copy(&self) -> bool {
        self.locals != Locals::Own
    }

    /// True if a replica that is to leave does so here, where a round was committed: none begins that it would leave in the middle.
    pub fn may_leave(&self) -> bool {
        !self.schedule.is_closing()
    }

    /// Ends the run: what is in flight is finished, then comes a round without data. Errors: `InvalidState` before `begin`, and if
    /// the run has ended.
    pub fn close(&mut self) -> Result<()> {
        self.integrity.check()?;
        self.schedule.close()
    }

    /// The replica leaves while the others go on. Errors: `InvalidState` before `begin` and after the end.
    pub fn leave(&mut self) -> Result<()> {
        self.integrity.check()?;
        self.schedule.leave()
    }

    /// This replica has left.
    pub fn left(&mut self) {
        self.schedule.left();
    }
}

#[cfg(test)]
mod tests {
    use ftcore::{Error, ErrorKind, Step};

    use super::*;

    fn running() -> Rounds<u64> {
        let mut rounds = Rounds::new(RoundRules {
            round_steps: 2,
            delay: 1,
            eager: false,
            last: Some(Step(3)),
        });
        rounds.begin().unwrap();
        assert_eq!(rounds.joined(Step(0)).unwrap(), Sends::Nothing);
        rounds.sent();
        rounds.applied(Ok(())).unwrap();
        rounds.begun();
        rounds.inner_step().unwrap();
        rounds
    }

    #[test]
    fn an_outer_gradient_lasts_until_its_round_commits_or_another_state_comes() {
        let mut rounds = running();
        assert_eq!(rounds.joined(Step(1)).unwrap(), Sends::Fresh);
        rounds.keep(Step(1), 7);
        rounds.sent();
        rounds.inner_step().unwrap();
        rounds.lost();
        assert_eq!(
            (rounds.joined(Step(1)).unwrap(), rounds.kept()),
            (Sends::Again, Some(&7))
        );
        rounds.sent();
        rounds.applied(Ok(())).unwrap();
        rounds.inner_step().unwrap();
        assert_eq!(
            (rounds.joined(Step(2)).unwrap(), rounds.kept()),
            (Sends::Fresh, None)
        );
        rounds.keep(Step(2), 8);
        rounds.sent();
        rounds.inner_step().unwrap();
        rounds.lost();
        rounds.loaded(1, Ok(())).unwrap();
        assert_eq!(
            (rounds.joined(Step(2)).unwrap(), rounds.kept()),
            (Sends::Fresh, None)
        );
    }

    #[test]
    fn inv4_inherited_inner_steps_are_dropped_once_and_the_round_in_flight_is_a_copy_until_it_commits() {
        let mut rounds = running();
        rounds.joined(Step(1)).unwrap();
        assert!(!rounds.is_copy() && !rounds.drops_inherited());
        rounds.loaded(1, Ok(())).unwrap();
        assert!(rounds.drops_inherited() && !rounds.drops_inherited());
        rounds.joined(Step(2)).unwrap();
        rounds.sent();
        rounds.lost();
        assert!(rounds.is_copy() && !rounds.drops_inherited());
        // Another source, in the next attempt.
        rounds.loaded(1, Ok(())).unwrap();
        assert!(rounds.drops_inherited());
        rounds.joined(Step(2)).unwrap();
        rounds.sent();
        rounds.applied(Ok(())).unwrap();
        assert!(!rounds.is_copy() && !rounds.drops_inherited());
        // A run that was stopped holds its own.
        let mut rounds = Rounds::<u64>::new(RoundRules {
            round_steps: 2,
            delay: 0,
            eager: false,
            last: None,
        });
        rounds.loaded(1, Ok(())).unwrap();
        rounds.restored(Step(3), None, false);
        assert!(!rounds.is_copy() && !rounds.drops_inherited());
        // One that was stopped in a round that it had healed into does not, of that round.
        rounds.restored(Step(3), Some(7), true);
        assert!(rounds.is_copy() && !rounds.drops_inherited());
    }

    #[test]
    fn a_replica_that_comes_back_in_the_closing_round_of_a_run_without_a_number_of_rounds_closes_it_too() {
        let mut rounds = Rounds::<u64>::new(RoundRules {
            round_steps: 2,
            delay: 0,
            eager: false,
            last: None,
        });
        rounds.begin().unwrap();
        for _ in 0..2 {
            // The first attempt is lost.
            rounds.lost();
            rounds.loaded(0, Ok(())).unwrap();
            rounds.closes_with(Step(5));
            assert_eq!(rounds.joined(Step(5)).unwrap(), Sends::Nothing);
            rounds.sent();
            assert_eq!(rounds.due(), Some(Due::Finish));
            assert!(rounds.is_last(Step(5)));
        }
        rounds.applied(Ok(())).unwrap();
        rounds.begun();
        assert!(rounds.is_finished() && rounds.inner_step().is_err());
        rounds.close().unwrap();
        assert_eq!(rounds.due(), None, "it has been through the closing round");
    }

    #[test]
    fn inv5_with_a_state_that_was_written_in_part_nothing_goes_on() {
        let broken = || Err::<(), _>(Error::new(ErrorKind::Io, "the device is gone"));
        for case in 0..3 {
            let mut rounds = running();
            rounds.joined(Step(1)).unwrap();
            let written = match case {
                0 => rounds.loaded(0, broken()),
                1 => rounds.applied(broken()),
                _ => rounds.written(broken()),
            };
            written.unwrap_err();
            for e in [
                rounds.joined(Step(1)).unwrap_err(),
                rounds.inner_step().unwrap_err(),
                rounds.close().unwrap_err(),
                rounds.leave().unwrap_err(),
                rounds.may_restore().unwrap_err(),
                rounds.check_begun().unwrap_err(),
            ] {
                assert_eq!(e.kind(), ErrorKind::InvalidState, "{e}");
            }
        }
    }
}

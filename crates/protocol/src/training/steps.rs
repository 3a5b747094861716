//! Data parallel: what an attempt at a step sends, and how far the run has got.
//!
//! Gradients belong to the state that they were computed on and, where the samples are dealt among the contributors, to this replica's
//! place among them. While these stand, a repeated attempt sends the same gradients; when they change they are computed anew.

use ftcore::{Error, ErrorKind, Result, Step};

use super::{Integrity, Sends};

/// This replica's share of an attempt, as the quorum says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// The step that the state is of, after healing.
    pub step: Step,
    /// The place among those that contribute; `None` if this replica does not.
    pub contributor_rank: Option<u32>,
    /// How many contribute.
    pub contributors: u32,
}

/// How far the run has got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// There was no quorum yet.
    New,
    /// There are steps to make.
    Running,
    /// The closing round is done.
    Closed,
    /// This replica has left.
    Left,
}

/// What gradients are of: the step, and the place among its contributors.
type Basis = (Step, Option<(Option<u32>, u32)>);

/// The steps of a run. `G` are the gradients of one step.
#[derive(Debug)]
pub struct Steps<G> {
    /// The number of steps, after which the run is closed; `None` if the training loop decides, and did not yet.
    last: Option<Step>,
    /// This replica's samples follow from its place among the contributors.
    by_place: bool,
    stage: Stage,
    /// The present call closes the run.
    closes: bool,
    /// The present attempt is one at the closing round.
    is_closing: bool,
    kept: Option<(Basis, G)>,
    integrity: Integrity,
}

impl<G> Steps<G> {
    /// A run of `last` steps, or one whose end the training loop decides. `by_place`: this replica's samples follow from its place among the
    /// contributors.
    pub fn new(last: Option<Step>, by_place: bool) -> Self {
        Self {
            last,
            by_place,
            stage: Stage::New,
            closes: false,
            is_closing: false,
            kept: None,
            integrity: Integrity::default(),
        }
    }

    /// Errors: `InvalidState` if the state is of no step, or the run has ended.
    pub fn check(&self) -> Result<()> {
        self.integrity.check()?;
        if matches!(self.stage, Stage::Closed | Stage::Left) {
            let text = "the run has ended: its closing round is done, and no step comes after it";
            return Err(Error::new(ErrorKind::InvalidState, text));
        }
        Ok(())
    }

    /// Errors: `InvalidState` if the state is of no step.
    pub fn check_state(&self) -> Result<()> {
        self.integrity.check()
    }

    /// Errors: `InvalidState` where a saved state cannot be taken up any more.
    pub fn may_restore(&self) -> Result<()> {
        self.integrity.check()?;
        if self.stage == Stage::New {
            return Ok(());
        }
        let text = "restore comes before the first step: what the state holds now is of the present one";
        Err(Error::new(ErrorKind::InvalidState, text))
    }

    /// A call of the training loop begins: a step, or (`closes`) the round that closes the run. Errors: those of [`check`](Self::check).
    pub fn begin(&mut self, closes: bool) -> Result<()> {
        self.check()?;
        // The caller may have changed its state or its samples since.
        (self.closes, self.kept) = (closes, None);
        Ok(())
    }

    /// True if the quorum that a replica at `step` asks for next is that of the run's last step.
    pub fn is_last(&self, step: Step) -> bool {
        self.closes || self.is_finished(step)
    }

    /// True once all steps of the run are done for a replica at `step`.
    pub fn is_finished(&self, step: Step) -> bool {
        self.last.is_some_and(|last| step >= last)
    }

    /// The members of the quorum for `step`, whose state this replica has now, close the run with it. The training loop here may not have decided so.
    pub fn closes_with(&mut self, step: Step) {
        self.last = Some(self.last.map_or(step, |last| last.min(step)));
    }

    /// There is a quorum: what this replica sends in it. Errors: `InvalidState` if a state was taken over in part: with that no rank goes on, not
    /// even to lose the vote (INV-5).
    pub fn joined(&mut self, share: &Share) -> Result<Sends> {
        self.integrity.check()?;
        self.stage = Stage::Running;
        self.is_closing = self.is_last(share.step);
        if self.is_closing {
            return Ok(Sends::Nothing);
        }
        if share.contributor_rank.is_none() {
            return Ok(Sends::Zeros);
        }
        Ok(match &self.kept {
            Some((of, _)) if *of == self.basis(share) => Sends::Again,
            _ => Sends::Fresh,
        })
    }

    fn basis(&self, share: &Share) -> Basis {
        let place = (share.contributor_rank, share.contributors);
        (share.step, Some(place).filter(|_| self.by_place))
    }

    /// Keeps what was computed in the attempt of `share`.
    pub fn keep(&mut self, share: &Share, gradients: G) {
        self.kept = Some((self.basis(share), gradients));
    }

    /// Keeps what was computed ahead of the quorum, on the state of `step`. Only where the place among the contributors does not matter.
    pub fn keep_ahead(&mut self, step: Step, gradients: G) {
        self.kept = Some(((step, None), gradients));
    }

    /// What [`Sends::Again`] sends.
    pub fn kept(&self) -> Option<&G> {
        self.kept.as_ref().map(|(_, gradients)| gradients)
    }

    /// What was kept for the step, which has committed.
    pub fn take_kept(&mut self) -> Option<G> {
        self.kept.take().map(|(_, gradients)| gradients)
    }

    /// Another state was written over this one, or a part of it. Errors: `InvalidState` if a part: a spare does not ask again with that.
    pub fn loaded(&mut self, outcome: Result<()>) -> Result<()> {
        self.kept = None;
        self.integrity.record(outcome).or_else(|_| self.integrity.check())
    }

    /// The step was committed, and its result applied or not. It has advanced by then: what goes wrong leaves a state of no step.
    pub fn applied<T>(&mut self, outcome: Result<T>) -> Result<T> {
        self.kept = None;
        if self.is_closing {
            self.stage = Stage::Closed;
        }
        self.integrity.record(outcome)
    }

    /// True between the steps of a run that has begun.
    pub fn is_running(&self) -> bool {
        self.stage == Stage::Running
    }

    /// True if `finish` makes the closing round for a replica at `step`: one that healed right into it has been through it already.
    pub fn closing_is_due(&self, step: Step) -> bool {
        self.stage != Stage::Closed && self.last.is_none_or(|last| step <= last)
    }

    /// No step comes any more.
    pub fn close(&mut self) -> Result<()> {
        self.integrity.check()?;
        self.stage = Stage::Closed;
        Ok(())
    }

    /// This replica has left.
    pub fn left(&mut self) {
        self.stage = Stage::Left;
    }

    /// True once this replica has left.
    pub fn has_left(&self) -> bool {
        self.stage == Stage::Left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(step: i64, (rank, world): (u32, u32), contributes: bool) -> Share {
        Share {
            step: Step(step),
            contributor_rank: Some(rank).filter(|_| contributes),
            contributors: world,
        }
    }

    fn broken() -> Result<()> {
        Err(Error::new(ErrorKind::Io, "the device is gone"))
    }

    #[test]
    fn gradients_are_sent_again_for_the_same_state_and_share_of_the_data_only() {
        let mut steps = Steps::new(Some(Step(9)), true);
        let first = share(3, (0, 2), true);
        steps.begin(false).unwrap();
        assert_eq!(steps.joined(&first).unwrap(), Sends::Fresh);
        steps.keep(&first, 7);
        assert_eq!(steps.joined(&first).unwrap(), Sends::Again);
        assert_eq!(steps.kept(), Some(&7));
        assert_eq!(steps.joined(&share(3, (0, 2), false)).unwrap(), Sends::Zeros);
        assert_eq!(
            steps.joined(&first).unwrap(),
            Sends::Again,
            "a spare may be needed again"
        );
        for other in [
            share(4, (0, 2), true),
            share(3, (1, 2), true),
            share(3, (0, 3), true),
        ] {
            assert_eq!(steps.joined(&other).unwrap(), Sends::Fresh);
        }
        assert_eq!(steps.joined(&share(9, (0, 2), true)).unwrap(), Sends::Nothing);
        steps.loaded(Ok(())).unwrap();
        assert_eq!(steps.joined(&first).unwrap(), Sends::Fresh);
        // Samples that do not depend on who else contributes.
        let mut steps = Steps::new(None, false);
        steps.keep(&first, 7);
        assert_eq!(steps.joined(&share(3, (0, 1), true)).unwrap(), Sends::Again);
        assert_eq!(steps.joined(&share(4, (0, 2), true)).unwrap(), Sends::Fresh);
        steps.begin(false).unwrap();
        assert_eq!(steps.joined(&first).unwrap(), Sends::Fresh, "another call");
        steps.begin(true).unwrap();
        assert_eq!(steps.joined(&first).unwrap(), Sends::Nothing);
    }

    #[test]
    fn gradients_that_were_computed_ahead_are_of_their_step_only() {
        let mut steps = Steps::new(None, false);
        steps.keep_ahead(Step(3), 7);
        assert_eq!(steps.joined(&share(3, (1, 2), true)).unwrap(), Sends::Again);
        assert_eq!(steps.joined(&share(4, (1, 2), true)).unwrap(), Sends::Fresh);
        // This replica healed, and its own work does not count.
        assert_eq!(steps.joined(&share(4, (1, 2), false)).unwrap(), Sends::Zeros);
    }

    #[test]
    fn inv5_with_a_state_that_was_written_in_part_there_is_no_step_and_no_end_in_good_order() {
        for heals in [true, false] {
            let mut steps = Steps::<()>::new(None, false);
            steps.begin(false).unwrap();
            steps.joined(&share(3, (0, 2), true)).unwrap();
            let written = if heals {
                steps.loaded(broken())
            } else {
                steps.applied(broken())
            };
            written.unwrap_err();
            for e in [
                steps.joined(&share(3, (0, 2), true)).unwrap_err(),
                steps.begin(false).unwrap_err(),
                steps.close().unwrap_err(),
                steps.may_restore().unwrap_err(),
            ] {
                assert_eq!(e.kind(), ErrorKind::InvalidState, "{e}");
            }
        }
    }

    #[test]
    fn after_the_closing_round_there_is_no_step_and_who_healed_into_it_does_it_once() {
        let mut steps = Steps::<()>::new(Some(Step(5)), false);
        assert!(steps.closing_is_due(Step(5)) && !steps.closing_is_due(Step(6)));
        steps.begin(true).unwrap();
        steps.joined(&share(5, (0, 2), true)).unwrap();
        steps.close().unwrap();
        assert!(
            !steps.closing_is_due(Step(5)),
            "finish may be called again after an error"
        );
        assert!(steps.check().is_err() && steps.check_state().is_ok());
        steps.left();
        assert!(steps.has_left() && steps.begin(true).is_err());
    }

    #[test]
    fn a_replica_that_comes_back_in_the_closing_round_of_a_run_without_a_number_of_steps_closes_it_too() {
        let mut steps = Steps::<()>::new(None, false);
        steps.begin(false).unwrap();
        assert!(!steps.is_last(Step(0)));
        // It healed into it.
        steps.closes_with(Step(5));
        assert_eq!(steps.joined(&share(5, (0, 2), false)).unwrap(), Sends::Nothing);
        assert!(steps.is_last(Step(5)), "the attempt may be lost");
        assert_eq!(steps.joined(&share(5, (0, 2), true)).unwrap(), Sends::Nothing);
        steps.applied(Ok(())).unwrap();
        assert!(steps.is_finished(Step(6)) && !steps.closing_is_due(Step(6)));
        assert_eq!(steps.begin(false).unwrap_err().kind(), ErrorKind::InvalidState);
        steps.close().unwrap();
    }
}

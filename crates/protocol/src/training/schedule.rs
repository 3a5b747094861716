//! The order of a run's rounds of DiLoCo: what is due when, without parameters, replicas, waiting or a clock.
//!
//! `Schedule::due` says what comes next; the engine does it and says how it went. Between two calls of the training loop nothing is due, unless
//! a call ended with an error: the next call then goes on with what was due, and counts no inner step for it.

use ftcore::{Error, ErrorKind, Result, Step};

/// What stays the same for the whole run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoundRules {
    /// Inner steps from round to round.
    pub round_steps: u64,
    /// A fragment is sent so many inner steps before the round ends.
    pub delay: u64,
    /// A round is sent where the one before it ends.
    pub eager: bool,
    /// The last step with data; `None` if the training loop decides.
    pub last: Option<Step>,
}

/// What the engine has to do before the next inner step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// A quorum; then the outer gradient of its step goes out.
    Send,
    /// Wait for what was sent, vote, and apply it.
    Finish,
}

/// How far the run has got, as the training loop sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    New,
    Restored,
    /// `begin` was called and has not got through.
    Beginning,
    Running,
    /// `finish` was called and has not got through.
    Closing,
    /// The closing round is done, or `leave` was called. Only leaving is left to do.
    Closed,
    /// This replica has left.
    Left,
}

/// The round that is being worked on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Round {
    /// Its quorum is to be asked for; `again` if an attempt at this step was lost.
    Open { again: bool },
    /// What it reduces was handed to the group.
    Sent,
}

/// A run's place in its rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Schedule {
    /// Inner steps from round to round, and how many of them come before a fragment is sent.
    round_steps: u64,
    send_at: u64,
    eager: bool,
    /// The last step with data, once it is known.
    last: Option<Step>,
    phase: Phase,
    /// The step that is being worked on: as many were committed.
    step: Step,
    /// Inner steps made in the current round.
    count: u64,
    round: Option<Round>,
}

fn refused<T>(text: &str) -> Result<T> {
    Err(Error::new(ErrorKind::InvalidState, text))
}

impl Schedule {
    pub(super) fn new(rules: RoundRules) -> Self {
        Self {
            round_steps: rules.round_steps,
            send_at: rules.round_steps.saturating_sub(rules.delay),
            eager: rules.eager,
            last: rules.last,
            phase: Phase::New,
            step: Step(0),
            count: 0,
            round: None,
        }
    }

    /// Inner steps made in the current round, for a replica that heals from here.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// The same for this replica itself, which goes on from a saved state: a round that is to be begun is begun then.
    pub(super) fn own_count(&self) -> u64 {
        match self.round {
            Some(Round::Open { again: false }) => self.count.max(self.send_at),
            _ => self.count,
        }
    }

    /// True if step `step` reduces an outer gradient: the initial synchronisation and the closing round have none.
    pub(super) fn has_data(&self, step: Step) -> bool {
        step > Step(0) && self.last.is_none_or(|last| step <= last)
    }

    /// True once all rounds with data are done.
    pub(super) fn is_finished(&self) -> bool {
        self.last.is_some_and(|last| self.step > last)
    }

    /// Round `step` closes the run: the one before it is the last with data.
    pub(super) fn closes_with(&mut self, step: Step) {
        let last = step - 1;
        self.last = Some(self.last.map_or(last, |known| known.min(last)));
    }

    /// What has to be done before the next inner step.
    pub(super) fn due(&self) -> Option<Due> {
        match self.round? {
            Round::Open { .. } => Some(Due::Send),
            // Nothing is left to overlap with: no inner steps belong to a round without data, and none come after the last round.
            Round::Sent if !self.has_data(self.step) || self.phase == Phase::Closing => Some(Due::Finish),
            Round::Sent if self.eager && self.last == Some(self.step) => Some(Due::Finish),
            Round::Sent => (self.count >= self.round_steps).then_some(Due::Finish),
        }
    }

    /// Errors: `InvalidState` where a saved run cannot be taken up any more.
    pub(super) fn may_restore(&self) -> Result<()> {
        match self.phase {
            Phase::New | Phase::Restored => Ok(()),
            _ => refused(
                "restore comes before begin: the run has begun, and what it holds now is of its present step",
            ),
        }
    }

    /// A saved run was taken up at `step`, with the outer gradient of a round in flight or without.
    pub(super) fn restored(&mut self, step: Step, with_gradient: bool) {
        (self.phase, self.step, self.round) = (Phase::Restored, step, None);
        if with_gradient {
            self.round = Some(Round::Open { again: false });
        } else if step == Step(0) || self.count >= self.send_at && self.has_data(step) {
            self.open();
        }
    }

    /// Joins the job. Once what is due is done, [`begun`](Self::begun) follows.
    pub(super) fn begin(&mut self) -> Result<()> {
        match self.phase {
            Phase::New => self.round = Some(Round::Open { again: false }),
            Phase::Restored | Phase::Beginning => {}
            _ => return refused("begin was called already: it is called once, before the first inner step"),
        }
        self.phase = Phase::Beginning;
        Ok(())
    }

    pub(super) fn begun(&mut self) {
        self.phase = Phase::Running;
    }

    /// Errors: `InvalidState` before `begin`.
    pub(super) fn check_begun(&self) -> Result<()> {
        match self.phase {
            Phase::New | Phase::Restored | Phase::Beginning => {
                refused("the run has not begun: call begin first, which joins the job or heals into it")
            }
            _ => Ok(()),
        }
    }

    /// Counts an inner step, unless something is still due from before it.
    ///
    /// Errors: `InvalidState` before `begin`, after the last round, and after `finish`.
    pub(super) fn inner_step(&mut self) -> Result<()> {
        self.check_begun()?;
        if self.phase != Phase::Running {
            return refused("finish or leave was called: no inner step comes after it");
        }
        if self.due().is_some() {
            return Ok(());
        }
        if self.is_finished() {
            return refused("all rounds of the run are done: call finish");
        }
        self.count += 1;
        if self.round.is_none() && self.count >= self.send_at {
            self.open();
        }
        Ok(())
    }

    fn open(&mut self) {
        self.round = Some(Round::Open { again: false });
        if self.eager {
            // The inner steps from here on overlap with this round.
            self.count = 0;
        }
    }

    /// The state was replaced by one in which so many inner steps of the round are made.
    pub(super) fn replaced(&mut self, count: u64) {
        self.count = count;
    }

    /// There is a quorum for `step`.
    pub(super) fn joined(&mut self, step: Step) {
        // The others won the vote that was lost here: the round is another one, in which inner steps are made.
        if step != self.step && matches!(self.round, Some(Round::Open { .. })) {
            self.round = Some(Round::Open { again: false });
        }
        self.step = step;
    }

    /// The round of the quorum's step was handed to the group.
    pub(super) fn sent(&mut self) {
        if let Some(Round::Open { again: true }) = self.round {
            // A replica that healed in a repeated round may stand before the end of its source's. The others wait for no replica's inner
            // steps, so that it too goes straight to the end of the round.
            self.count = self.count.max(self.round_steps);
        }
        self.round = Some(Round::Sent);
    }

    /// The round did not commit: it is done again at once.
    pub(super) fn lost(&mut self) {
        self.round = Some(Round::Open { again: true });
    }

    /// The round was committed and applied.
    pub(super) fn committed(&mut self) {
        let had_data = self.has_data(self.step);
        self.round = None;
        self.count = 0;
        self.step += 1;
        if self.phase == Phase::Closing {
            self.close_if_needed();
        } else if self.eager && had_data && !self.is_finished() {
            self.open();
        }
    }

    /// Ends the run: what is in flight is finished, then comes a round without data. Once what is due is done, [`left`](Self::left) follows.
    pub(super) fn close(&mut self) -> Result<()> {
        self.check_begun()?;
        if self.phase == Phase::Left {
            return refused("the run has ended: finish was called already");
        }
        if self.phase == Phase::Running {
            // All replicas call it after the same round: what is in flight is the last one with data.
            self.closes_with(self.step + i64::from(self.round.is_some()));
            self.phase = Phase::Closing;
            if self.round.is_none() {
                self.close_if_needed();
            }
        }
        Ok(())
    }

    /// A replica that healed right into the closing round has been through it already.
    fn close_if_needed(&mut self) {
        if self.last.is_none_or(|last| self.step <= last + 1) {
            self.round = Some(Round::Open { again: false });
        } else {
            self.phase = Phase::Closed;
        }
    }

    /// True while the run is ended by all replicas.
    pub(super) fn is_closing(&self) -> bool {
        self.phase == Phase::Closing
    }

    /// The replica leaves while the others go on: nothing is due any more. Once it is gone, [`left`](Self::left) follows. Errors: `InvalidState` before
    /// `begin` and after the end.
    pub(super) fn leave(&mut self) -> Result<()> {
        self.check_begun()?;
        if self.phase == Phase::Left {
            return refused("the run has ended: this replica has left already");
        }
        (self.phase, self.round) = (Phase::Closed, None);
        Ok(())
    }

    pub(super) fn left(&mut self) {
        self.phase = Phase::Left;
    }
}

#[cfg(test)]
mod tests;

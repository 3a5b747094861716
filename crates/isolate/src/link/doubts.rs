//! Losses that a child reports, and whether another source knows better.
//!
//! A library without abort sees only that another rank's end of a connection is gone: the rank that aborted has said why in the store, and
//! ended its child after that. So where the other ranks are watched a loss is held back here until the store was asked for the news, which
//! is certain to find what was said. Then it counts as what the news say, or as it is.

use ftcore::{Error, ErrorKind, Result};

use super::Link;
use crate::wire::frames::Report;

/// What is held back of a child's reports.
#[derive(Default)]
pub(super) struct Doubts {
    held: Vec<Report>,
    /// A thread is asking, and will call [`Link::settle`].
    asking: bool,
}

impl Report {
    fn errors(&mut self) -> impl Iterator<Item = &mut Error> {
        let (first, second) = match self {
            Self::Done(done) => (done.result.as_mut().err(), done.poison.as_mut()),
            Self::Answer { result, .. } => (result.as_mut().err(), None),
            Self::Poison { error, .. } => (Some(error), None),
            Self::Ready { .. } | Self::Refused(_) => (None, None),
        };
        first
            .into_iter()
            .chain(second)
            .filter(|e| e.kind() == ErrorKind::PeerLost)
    }
}

impl Link {
    /// Takes a report; false if it is held back, and what it ends with it. `Protocol` if the child reports what was never asked.
    pub(crate) fn take(&self, mut report: Report) -> Result<bool> {
        if report.errors().next().is_none() {
            return self.carry_out(report).map(|()| true);
        }
        let mut report = Some(report);
        self.herald().inquire(|| {
            let mut state = self.lock();
            // What fails now fails for a reason that is known.
            if state.ending.is_none() && state.gone.is_none() {
                state.doubts.held.extend(report.take());
                return !std::mem::replace(&mut state.doubts.asking, true);
            }
            false
        });
        match report {
            Some(report) => self.carry_out(report).map(|()| true),
            None => Ok(false),
        }
    }

    /// The store was asked: what is held back counts, as a loss or as what another rank told.
    pub(crate) fn settle(&self, told: Option<&Error>) {
        loop {
            let held = {
                let doubts = &mut self.lock().doubts;
                doubts.asking = !doubts.held.is_empty();
                std::mem::take(&mut doubts.held)
            };
            if held.is_empty() {
                return;
            }
            for mut report in held {
                if let Some(told) = told {
                    report.errors().for_each(|error| error.clone_from(told));
                }
                if let Err(error) = self.carry_out(report) {
                    self.end(error, None, std::time::Duration::ZERO);
                }
            }
        }
    }

    fn carry_out(&self, report: Report) -> Result<()> {
        match report {
            Report::Done(done) => self.done(done)?,
            Report::Answer { call, result } => self.answered(call, result),
            Report::Poison { group, error } => self.poisoned(group, &error),
            Report::Ready {
                capabilities,
                library,
            } => self.greeted(Ok((capabilities, library))),
            Report::Refused(error) => self.greeted(Err(error)),
        }
        Ok(())
    }
}

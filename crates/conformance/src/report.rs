//! The suite for a program that shows the verdicts in its own way.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, Result};

use crate::credentials::forget;
use crate::{Failure, Plan};

/// What came of a case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The backend does what it should.
    Passed,
    /// It does not; what the ranks saw.
    Failed(Failure),
    /// The case was not run: the backend does not advertise what it needs, or it does not fit the plan. The reason.
    NotOffered(String),
}

/// A case and what came of it.
#[derive(Debug, Clone)]
pub struct Tried {
    /// `mode::area::case::worldN`.
    pub name: String,
    /// What came of it.
    pub verdict: Verdict,
    /// How long it took.
    pub took: Duration,
}

impl Tried {
    /// What the case is about: the second part of its name.
    pub fn area(&self) -> &str {
        self.name.split("::").nth(1).unwrap_or(&self.name)
    }
}

impl Plan {
    /// Runs every case whose name contains `part`, several at once ([`Plan::at_once`]); `ended` is called after each, with the number of all of them.
    /// The verdicts are in the suite's order.
    ///
    /// Errors: the backend cannot be used here; `InvalidArgument` if no case has that name.
    pub fn tried(&self, part: &str, mut ended: impl FnMut(&Tried, usize)) -> Result<Vec<Tried>> {
        let mut placed = self.laid_out()?;
        placed.retain(|placed| placed.name().contains(part));
        if placed.is_empty() {
            return Err(Error::invalid(format!("no case has '{part}' in its name")));
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let at_once = self.at_once.unwrap_or(cores).clamp(1, placed.len());
        let next = AtomicUsize::new(0);
        let (tell, told) = channel();
        let mut tried: Vec<Option<Tried>> = vec![None; placed.len()];
        std::thread::scope(|scope| {
            for _ in 0..at_once {
                let (tell, next, placed) = (tell.clone(), &next, &placed);
                scope.spawn(move || {
                    loop {
                        let at = next.fetch_add(1, Ordering::Relaxed);
                        let Some(placed) = placed.get(at) else {
                            break;
                        };
                        let began = Instant::now();
                        let verdict = placed.judge();
                        let one = Tried {
                            name: placed.name(),
                            verdict,
                            took: began.elapsed(),
                        };
                        // Who does not listen any more has given up.
                        let _ = tell.send((at, one));
                    }
                });
            }
            drop(tell);
            for (at, one) in told {
                ended(&one, placed.len());
                if let Some(place) = tried.get_mut(at) {
                    *place = Some(one);
                }
            }
        });
        forget();
        let complete: Option<Vec<Tried>> = tried.into_iter().collect();
        complete.ok_or_else(|| Error::new(ErrorKind::Internal, "a case of the suite has no verdict"))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ftcore::Device;

    use super::*;
    use crate::Mode;

    #[test]
    fn what_cannot_be_made_is_the_error_of_the_whole_report() {
        let make: crate::MakeOn = Arc::new(|_, _| Err(Error::unsupported("no such device")));
        let plan = Plan::new(Device::CPU, &[Mode::Threads], make);
        let error = plan.tried("", |_, _| {}).unwrap_err();
        assert!(error.to_string().contains("no such device"), "{error}");
    }
}

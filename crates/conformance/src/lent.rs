//! A group that many cases use, one after the other: what a case sees of it, and what it may not do to it.
//!
//! Where starting a group is dear, the cases that leave a group as they found it run on one that lives on (`lasting`).
//! A case that ends or reconfigures it is refused and noted, so that a case that is marked wrongly fails instead of spoiling the next.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ftcore::{
    Checked, Completion, Configuration, Error, ErrorKind, Failed, ProcessGroup, Rejected, Result,
    SubmitOptions, Work, Wrapper,
};

/// One rank's end of a group that outlives the case.
pub(crate) struct Lasting {
    group: Box<dyn ProcessGroup>,
    misused: AtomicBool,
}

impl Lasting {
    pub(crate) fn new(group: Box<dyn ProcessGroup>) -> Self {
        Self {
            group,
            misused: AtomicBool::new(false),
        }
    }

    /// Why the next case must not have it; `None` if it is as it was.
    pub(crate) fn spoiled(&self) -> Option<String> {
        if self.misused.load(Ordering::Relaxed) {
            return Some("the case ended or configured a group that is not its own".to_string());
        }
        self.group
            .error()
            .map(|e| format!("the case left a group behind that has failed: {e}"))
    }

    /// Ends it: the harness may.
    pub(crate) fn shutdown(&self, deadline: Instant) -> Result<()> {
        self.group.shutdown(deadline)
    }

    fn refuse(&self, what: &str) -> Error {
        self.misused.store(true, Ordering::Relaxed);
        let text = format!("{what}: other cases use this group too; mark the case as one with its own group");
        Error::new(ErrorKind::InvalidState, text)
    }
}

/// What a case gets. Dropping it leaves the group as it is.
pub(crate) struct Lent(pub(crate) Arc<Lasting>);

impl Wrapper for Lent {
    fn inner(&self) -> &dyn ProcessGroup {
        &*self.0.group
    }

    fn configure(&self, _: Configuration) -> Result<()> {
        Err(self.0.refuse("configure"))
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        self.0.group.submit(op, options)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        self.0.group.execute(op, options)
    }

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        self.0.group.split(color, key, deadline)
    }

    fn abort(&self, _: &str) {
        // There is no caller to give the error to; the harness asks.
        drop(self.0.refuse("abort"));
    }

    fn shutdown(&self, _: Instant) -> Result<()> {
        Err(self.0.refuse("shutdown"))
    }
}

#[cfg(test)]
mod tests {
    use ftcore::{Capabilities, GroupInfo, Traffic};

    use super::*;

    struct Nothing(Capabilities);

    impl ProcessGroup for Nothing {
        fn info(&self) -> GroupInfo {
            GroupInfo {
                backend: "nothing".into(),
                name: "nothing".into(),
                rank: 0,
                world_size: 1,
                epoch: ftcore::Epoch(1),
                device: ftcore::Device::CPU,
                dropped_options: Vec::new(),
            }
        }
        fn capabilities(&self) -> &Capabilities {
            &self.0
        }
        fn configure(&self, _: Configuration) -> Result<()> {
            Ok(())
        }
        fn submit(&self, op: Checked, _: SubmitOptions) -> Result<Work, Box<Rejected>> {
            let error = Error::unsupported("nothing");
            Err(Box::new(Rejected {
                error,
                op: op.into_inner(),
            }))
        }
        fn split(&self, _: Option<u32>, _: u32, _: Instant) -> Result<Option<Box<dyn ProcessGroup>>> {
            Ok(None)
        }
        fn abort(&self, _: &str) {}
        fn error(&self) -> Option<Error> {
            None
        }
        fn shutdown(&self, _: Instant) -> Result<()> {
            Ok(())
        }
        fn traffic(&self) -> Traffic {
            Traffic::default()
        }
    }

    fn nothing() -> Capabilities {
        Capabilities {
            ops: ftcore::OpSet::of(&[]),
            moves: ftcore::DTypeSet::of(&[]),
            reduces: [ftcore::DTypeSet::of(&[]); ftcore::ReduceOp::COUNT],
            features: ftcore::FeatureSet::NONE,
            options: Vec::new(),
            devices: ftcore::names(&["cpu"]),
            notes: Vec::new(),
        }
    }

    #[test]
    fn a_case_that_ends_a_group_of_others_fails() {
        let soon = ftcore::deadline_in(std::time::Duration::from_secs(5));
        let uses: [fn(&dyn ProcessGroup, Instant); 2] = [
            |g, _| g.abort("mine"),
            |g, by| {
                assert_eq!(g.shutdown(by).unwrap_err().kind(), ErrorKind::InvalidState);
            },
        ];
        for misuse in uses {
            let lasting = Arc::new(Lasting::new(Box::new(Nothing(nothing()))));
            drop(Lent(lasting.clone()));
            assert_eq!(lasting.spoiled(), None);
            misuse(&Lent(lasting.clone()), soon);
            assert!(lasting.spoiled().is_some());
        }
    }
}

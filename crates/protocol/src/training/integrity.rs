//! Whether a replica's state is of a step, or was written in part and is one that no rank may go on from (INV-5).
//!
//! What takes a state over or applies a committed step passes the outcome through [`Integrity::record`]; what asks for a quorum, saves or
//! sends the state asks [`Integrity::check`] first.

use ftcore::{Error, ErrorKind, Result};

/// Remembers the first error that left a state of no step. Nothing makes such a state whole again but a restart of the replica, which heals.
#[derive(Debug, Default)]
pub struct Integrity {
    torn: Option<Error>,
}

impl Integrity {
    /// Passes on how a write of the state ended. From the first error on, the state is of no step.
    pub fn record<T>(&mut self, written: Result<T>) -> Result<T> {
        if let Err(e) = &written {
            self.torn.get_or_insert_with(|| e.clone());
        }
        written
    }

    /// Errors: `InvalidState`, with the first cause and what to do, if the state is of no step.
    pub fn check(&self) -> Result<()> {
        let Some(why) = &self.torn else {
            return Ok(());
        };
        let text = format!(
            "this replica's state was written in part only and is of no step ({}): start the replica again, so that it heals",
            why.message()
        );
        Err(Error::new(ErrorKind::InvalidState, text).with_source(why.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inv5_the_first_error_is_the_one_that_is_told_and_nothing_makes_the_state_whole_again() {
        let mut integrity = Integrity::default();
        assert_eq!(integrity.record(Ok(3)).unwrap(), 3);
        integrity.check().unwrap();
        let failed = |text: &str| Err::<(), _>(Error::new(ErrorKind::Io, text));
        assert_eq!(
            integrity.record(failed("the disk is full")).unwrap_err().kind(),
            ErrorKind::Io
        );
        integrity.record(failed("the second")).unwrap_err();
        integrity.record(Ok(())).unwrap();
        let e = integrity.check().unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidState);
        for part in ["the disk is full", "of no step", "start the replica again"] {
            assert!(e.to_string().contains(part), "{e}");
        }
    }
}

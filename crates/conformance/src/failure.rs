//! Why a case failed, as text; every error of ftcore turns into one with `?`.

use std::fmt;

use ftcore::{Error, Rejected, Tensor};

/// Why a case failed.
#[derive(Clone, PartialEq, Eq)]
pub struct Failure(String);

/// What a case returns on one rank.
pub type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// With that text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        Self(format!("unexpected error: {e}"))
    }
}

impl From<Box<Rejected>> for Failure {
    fn from(r: Box<Rejected>) -> Self {
        Self(format!("unexpected refusal: {}", r.error))
    }
}

impl From<Box<(Error, Tensor)>> for Failure {
    fn from(e: Box<(Error, Tensor)>) -> Self {
        e.0.into()
    }
}

/// The failures of all ranks in one text.
pub(crate) fn verdict(failures: Vec<String>) -> Outcome {
    if failures.is_empty() {
        Ok(())
    } else {
        Err(Failure::new(failures.join("\n")))
    }
}

/// Fails the case with a text unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err($crate::Failure::new(format!($($text)+)));
        }
    };
}

/// Fails unless that many tensors came back: one that is missing has no contents that would be wrong.
pub(crate) fn came_back(tensors: &[Tensor], given: usize) -> Outcome {
    ensure!(
        tensors.len() == given,
        "{} tensors came back, expected {given}",
        tensors.len()
    );
    Ok(())
}

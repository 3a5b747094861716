//! The numbers that say when in a job something happened. Each is a type of its own, so that none is taken for another.

use std::fmt;
use std::ops::{Add, AddAssign, Sub, SubAssign};

/// The generation of a group's configuration; the quorum id where a manager runs the group. Every frame carries it (INV-1). 0 is none, where
/// there may be none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Epoch(pub u64);

/// How many steps led to a training state: 0 before the first. Signed, as in torchft's protocol; one below 0 comes only from a peer, and is
/// refused where it comes in.
///
/// Sums and differences end at the limits of `i64`: a peer may claim any step.
///
/// ```
/// use ftcore::Step;
///
/// let step = Step(7);
/// assert_eq!(step + 1, Step(8));
/// assert_eq!(Step(9) - step, 2);
/// assert_eq!(format!("step {step}"), "step 7");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Step(pub i64);

impl Epoch {
    /// The epoch that torchft's protocol and written states hold as this signed number. One below 0, which no lighthouse gives, becomes larger
    /// than every epoch that one gives; [`signed`](Self::signed) gives the same number back.
    pub fn of_signed(number: i64) -> Self {
        Self(number.cast_unsigned())
    }

    /// The number as torchft's protocol and written states hold it.
    pub fn signed(self) -> i64 {
        self.0.cast_signed()
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Add<u64> for Epoch {
    type Output = Self;

    fn add(self, epochs: u64) -> Self {
        Self(self.0.saturating_add(epochs))
    }
}

impl Sub<u64> for Epoch {
    type Output = Self;

    fn sub(self, epochs: u64) -> Self {
        Self(self.0.saturating_sub(epochs))
    }
}

impl Add<i64> for Step {
    type Output = Self;

    fn add(self, steps: i64) -> Self {
        Self(self.0.saturating_add(steps))
    }
}

impl AddAssign<i64> for Step {
    fn add_assign(&mut self, steps: i64) {
        *self = *self + steps;
    }
}

impl Sub<i64> for Step {
    type Output = Self;

    fn sub(self, steps: i64) -> Self {
        Self(self.0.saturating_sub(steps))
    }
}

impl SubAssign<i64> for Step {
    fn sub_assign(&mut self, steps: i64) {
        *self = *self - steps;
    }
}

impl Sub for Step {
    type Output = i64;

    fn sub(self, other: Self) -> i64 {
        self.0.saturating_sub(other.0)
    }
}

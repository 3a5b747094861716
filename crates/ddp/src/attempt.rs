//! What an attempt at a step sends, as a pure rule: no group, no tensors, no clock.
//!
//! Gradients belong to the state that they were computed on, and to the share of the data that this replica had: its place among the
//! contributors. While both stand, a repeated attempt sends the same gradients; when either changes they are computed anew.

use manager::Participation;

/// What this replica sends in an attempt.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Sends<'a, G> {
    /// The closing round has no data.
    Nothing,
    /// It does not contribute, so it computes nothing.
    Zeros,
    /// The gradients of an earlier attempt.
    Again(&'a G),
    /// Gradients that are computed now.
    Fresh,
}

/// The gradients that were computed for the present step, if there are any.
#[derive(Debug)]
pub(crate) struct Kept<G>(Option<(Basis, G)>);

/// What gradients are of: the step, and the place among its contributors.
type Basis = (i64, Place);
/// Which of how many.
type Place = (u32, u32);

/// This replica's place among those that contribute.
fn place(participation: &Participation) -> Place {
    (participation.replica_rank, participation.replica_world_size)
}

impl<G> Default for Kept<G> {
    fn default() -> Self {
        Self(None)
    }
}

impl<G> Kept<G> {
    /// The state is another one now.
    pub(crate) fn forget(&mut self) {
        self.0 = None;
    }

    /// Keeps what was computed in the attempt of `participation`.
    pub(crate) fn keep(&mut self, participation: &Participation, gradients: G) {
        self.0 = Some(((participation.step, place(participation)), gradients));
    }

    pub(crate) fn sends(&self, participation: &Participation, closing: bool) -> Sends<'_, G> {
        if closing {
            return Sends::Nothing;
        }
        if !participation.contributes {
            return Sends::Zeros;
        }
        match &self.0 {
            Some((of, gradients)) if *of == (participation.step, place(participation)) => {
                Sends::Again(gradients)
            }
            _ => Sends::Fresh,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt(step: i64, (rank, world): (u32, u32), contributes: bool) -> Participation {
        Participation {
            epoch: 1,
            step,
            replica_rank: rank,
            replica_world_size: world,
            contributes,
            healed: None,
            members: Vec::new(),
        }
    }

    #[test]
    fn gradients_are_sent_again_for_the_same_state_and_share_of_the_data_only() {
        let mut kept = Kept::default();
        let first = attempt(3, (0, 2), true);
        assert_eq!(kept.sends(&first, false), Sends::Fresh);
        kept.keep(&first, 7);
        assert_eq!(kept.sends(&first, false), Sends::Again(&7));
        assert_eq!(kept.sends(&first, true), Sends::Nothing);
        assert_eq!(kept.sends(&attempt(3, (0, 2), false), false), Sends::Zeros);
        assert_eq!(
            kept.sends(&first, false),
            Sends::Again(&7),
            "a spare may be needed again"
        );
        for other in [
            attempt(4, (0, 2), true),
            attempt(3, (1, 2), true),
            attempt(3, (0, 3), true),
        ] {
            assert_eq!(kept.sends(&other, false), Sends::Fresh);
        }
        kept.forget();
        assert_eq!(kept.sends(&first, false), Sends::Fresh);
    }
}

//! What an attempt at a step sends, as a pure rule: no group, no tensors, no clock.
//!
//! Gradients belong to the state that they were computed on and, where the samples are dealt among the contributors, to this replica's
//! place among them. While these stand, a repeated attempt sends the same gradients; when they change they are computed anew.

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
pub(crate) struct Kept<G> {
    gradients: Option<(Basis, G)>,
    /// The samples follow from the place among the contributors.
    by_place: bool,
}

/// What gradients are of: the step, and the place among its contributors.
type Basis = (i64, Option<Place>);
/// Which of how many.
type Place = (Option<u32>, u32);

impl<G> Kept<G> {
    /// `by_place`: this replica's samples follow from its place among the contributors.
    pub(crate) fn new(by_place: bool) -> Self {
        Self {
            gradients: None,
            by_place,
        }
    }

    fn basis(&self, participation: &Participation) -> Basis {
        let place = (participation.contributor_rank, participation.contributors);
        (participation.step, Some(place).filter(|_| self.by_place))
    }

    /// The state is another one now.
    pub(crate) fn forget(&mut self) {
        self.gradients = None;
    }

    /// Keeps what was computed in the attempt of `participation`.
    pub(crate) fn keep(&mut self, participation: &Participation, gradients: G) {
        self.gradients = Some((self.basis(participation), gradients));
    }

    pub(crate) fn sends(&self, participation: &Participation, closing: bool) -> Sends<'_, G> {
        if closing {
            return Sends::Nothing;
        }
        if !participation.contributes {
            return Sends::Zeros;
        }
        match &self.gradients {
            Some((of, gradients)) if *of == self.basis(participation) => Sends::Again(gradients),
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
            contributor_rank: Some(rank).filter(|_| contributes),
            contributors: world,
            healed: None,
            members: Vec::new(),
        }
    }

    #[test]
    fn gradients_are_sent_again_for_the_same_state_and_share_of_the_data_only() {
        let mut kept = Kept::new(true);
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
        // Samples that do not depend on who else contributes.
        let mut kept = Kept::new(false);
        kept.keep(&first, 7);
        assert_eq!(kept.sends(&attempt(3, (0, 1), true), false), Sends::Again(&7));
        assert_eq!(kept.sends(&attempt(4, (0, 2), true), false), Sends::Fresh);
    }
}

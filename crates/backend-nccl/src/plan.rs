//! How a communicator is made out of what the ranks hold of earlier ones: pure, and safe from whatever another process says (INV-10).
//!
//! Each rank says what it holds ([`Holding`], in its greeting); rank 0 makes a [`Plan`] of all that and tells it as text if it is a
//! [`Reuse`]; everybody checks that this fits what it holds itself.

use std::collections::BTreeSet;

/// The random name of a communicator: the token of the meeting that it was made at.
pub(crate) type CommId = [u8; 16];

/// How a communicator ended up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum How {
    /// Nothing was pending on this rank.
    Idle = 1,
    /// It failed and was revoked.
    Revoked = 2,
}

/// What a rank says that it holds. From the network: believed only as far as a [`Plan`] checks it (INV-10).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Holding {
    pub(crate) id: CommId,
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) how: How,
}

/// What becomes of the holders' communicator before newcomers join.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Base {
    /// It stays as it is.
    Same,
    /// All its ranks go on, in the order of their new ranks.
    Split,
    /// These of its ranks are missing.
    Shrink(Vec<u32>),
}

/// A communicator made out of the one that the first `holders` ranks hold; the others join it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Reuse {
    pub(crate) base: Base,
    pub(crate) holders: u32,
}

/// How the next communicator is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Plan {
    /// By a new unique id.
    Fresh,
    Reuse(Reuse),
}

/// More ranks than these are not planned for: a plan travels as text of bounded length.
const LARGEST: u32 = 256;

impl Plan {
    /// The plan for what the ranks hold, in the order of their new ranks. Anything that does not fit together exactly is `Fresh`.
    pub(crate) fn of(holdings: &[Option<Holding>], can_grow: bool) -> Self {
        let holders: Vec<Holding> = holdings.iter().map_while(|h| *h).collect();
        let Some(first) = holders.first() else {
            return Self::Fresh;
        };
        let newcomers = holdings.len() - holders.len();
        let alike = |h: &Holding| (h.id, h.world, h.how) == (first.id, first.world, first.how);
        let olds: BTreeSet<u32> = holders.iter().map(|h| h.rank).collect();
        let fits = first.world <= LARGEST
            && holdings.iter().flatten().count() == holders.len()
            && holders.iter().all(alike)
            && olds.len() == holders.len()
            && olds.iter().all(|r| *r < first.world)
            && (newcomers == 0 || can_grow);
        if !fits {
            return Self::Fresh;
        }
        let in_order = holders.windows(2).all(|w| matches!(w, [a, b] if a.rank < b.rank));
        let missing: Vec<u32> = (0..first.world).filter(|r| !olds.contains(r)).collect();
        let base = match (missing.is_empty(), in_order) {
            // NCCL promises to grow one on which nothing failed.
            (true, true) if newcomers > 0 && first.how == How::Idle => Base::Same,
            (true, _) => Base::Split,
            // Those who stay keep their order.
            (false, true) => Base::Shrink(missing),
            (false, false) => return Self::Fresh,
        };
        Self::Reuse(Reuse {
            base,
            holders: u32::try_from(holders.len()).unwrap_or(u32::MAX),
        })
    }
}

impl Reuse {
    /// `None` for what rank 0 would not say to a rank that holds `own` in a world of `world`.
    pub(crate) fn decode(text: &str, own: Option<&Holding>, rank: u32, world: u32) -> Option<Self> {
        let mut words = text.strip_prefix("reuse ")?.split(' ');
        let holders: u32 = words.next()?.parse().ok()?;
        let base = match words.next()? {
            "same" => Base::Same,
            "split" => Base::Split,
            shrink => {
                let list = shrink.strip_prefix("shrink:")?.split(',');
                let gone: Vec<u32> = list.map(|r| r.parse().ok()).collect::<Option<_>>()?;
                Base::Shrink(gone)
            }
        };
        let fits =
            holders > 0 && holders <= world && words.next().is_none() && own.is_some() == (rank < holders);
        let serves = own.is_none_or(|own| match &base {
            Base::Same => own.world == holders && own.rank == rank && own.how == How::Idle && holders < world,
            Base::Split => own.world == holders,
            // Strictly rising, so none is named twice; as many as must be missing; and this rank where it expects to be.
            Base::Shrink(gone) => {
                gone.windows(2).all(|w| matches!(w, [a, b] if a < b))
                    && gone.last().is_some_and(|last| *last < own.world)
                    && own.world.checked_sub(holders) == u32::try_from(gone.len()).ok()
                    && !gone.contains(&own.rank)
                    && own
                        .rank
                        .checked_sub(gone.iter().filter(|g| **g < own.rank).count() as u32)
                        == Some(rank)
            }
        });
        (fits && serves).then_some(Self { base, holders })
    }

    pub(crate) fn encode(&self) -> String {
        let base = match &self.base {
            Base::Same => "same".to_string(),
            Base::Split => "split".to_string(),
            Base::Shrink(gone) => {
                let gone: Vec<String> = gone.iter().map(ToString::to_string).collect();
                format!("shrink:{}", gone.join(","))
            }
        };
        format!("reuse {} {base}", self.holders)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(rank: u32, world: u32, how: How) -> Option<Holding> {
        Some(Holding {
            id: [7; 16],
            rank,
            world,
            how,
        })
    }

    fn reuse(base: Base, holders: u32) -> Plan {
        Plan::Reuse(Reuse { base, holders })
    }

    #[test]
    fn survivors_shrink_and_newcomers_join_behind_them() {
        use How::{Idle, Revoked};
        let two_of_three = [held(0, 3, Revoked), held(2, 3, Revoked)];
        assert_eq!(Plan::of(&two_of_three, true), reuse(Base::Shrink(vec![1]), 2));
        let replaced = [held(0, 3, Revoked), held(2, 3, Revoked), None];
        assert_eq!(Plan::of(&replaced, true), reuse(Base::Shrink(vec![1]), 2));
        let all = [held(0, 2, Revoked), held(1, 2, Revoked)];
        assert_eq!(Plan::of(&all, true), reuse(Base::Split, 2));
        let turned = [held(1, 2, Idle), held(0, 2, Idle)];
        assert_eq!(Plan::of(&turned, true), reuse(Base::Split, 2));
        let more = [held(0, 2, Idle), held(1, 2, Idle), None];
        assert_eq!(Plan::of(&more, true), reuse(Base::Same, 2));
        let more = [held(0, 2, Revoked), held(1, 2, Revoked), None];
        assert_eq!(Plan::of(&more, true), reuse(Base::Split, 2));
        assert_eq!(Plan::of(&more, false), Plan::Fresh);
    }

    #[test]
    fn holdings_that_do_not_fit_together_lead_to_a_fresh_communicator() {
        use How::{Idle, Revoked};
        let other = held(1, 2, Idle).map(|h| Holding { id: [8; 16], ..h });
        for (why, holdings) in [
            ("nobody holds one", vec![None, None]),
            ("two communicators", vec![held(0, 2, Idle), other]),
            ("two sizes", vec![held(0, 3, Idle), held(1, 2, Idle)]),
            ("two states", vec![held(0, 2, Idle), held(1, 2, Revoked)]),
            ("one rank twice", vec![held(1, 3, Idle), held(1, 3, Idle)]),
            ("no such rank", vec![held(0, 2, Idle), held(2, 2, Idle)]),
            ("a newcomer in front", vec![None, held(1, 2, Idle)]),
            (
                "a newcomer in the middle",
                vec![held(0, 2, Idle), None, held(1, 2, Idle)],
            ),
            ("turned and one missing", vec![held(2, 3, Idle), held(0, 3, Idle)]),
            ("too large", vec![held(0, u32::MAX, Idle)]),
            ("nobody at all", vec![]),
        ] {
            assert_eq!(Plan::of(&holdings, true), Plan::Fresh, "{why}");
        }
    }

    #[test]
    fn a_plan_survives_the_wire_and_one_that_does_not_fit_is_refused() {
        use How::{Idle, Revoked};
        let own = held(2, 3, Revoked);
        let plan = Reuse {
            base: Base::Shrink(vec![1]),
            holders: 2,
        };
        assert_eq!(
            Reuse::decode(&plan.encode(), own.as_ref(), 1, 2),
            Some(plan.clone())
        );
        assert_eq!(Reuse::decode(&plan.encode(), None, 2, 3), Some(plan.clone()));
        for (text, own, rank, world) in [
            // Whoever holds nothing cannot take part, and whoever holds something is no newcomer.
            ("reuse 2 shrink:1", None, 1, 2),
            ("reuse 1 shrink:0,1", own, 1, 2),
            // This rank would come out somewhere else, is excluded itself, or is counted wrongly.
            ("reuse 2 shrink:1", own, 0, 2),
            ("reuse 2 shrink:2", own, 1, 2),
            ("reuse 2 shrink:0,1", own, 1, 2),
            ("reuse 2 shrink:1,1", own, 1, 2),
            ("reuse 2 shrink:9", own, 1, 2),
            ("reuse 2 split", own, 1, 2),
            ("reuse 2 same", held(1, 2, Revoked), 1, 3),
            ("reuse 2 same", held(1, 2, Idle), 1, 2),
            ("reuse 3 split", held(1, 3, Idle), 1, 2),
            ("reuse 0 split", None, 0, 2),
            ("reuse 2 shrink:", own, 1, 2),
            ("reuse 2 shrink:1 more", own, 1, 2),
            ("fresh", own, 1, 2),
            ("", own, 1, 2),
            ("reuse", own, 1, 2),
            ("grow", own, 1, 2),
        ] {
            assert_eq!(Reuse::decode(text, own.as_ref(), rank, world), None, "'{text}'");
        }
    }
}

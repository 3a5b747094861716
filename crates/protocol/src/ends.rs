//! Epochs that are over, as the lighthouse says: what a rank's group has in hand may finish first.
//!
//! The notice of a death travels over the lighthouse, and often overtakes data that the dead replica had sent: its last step may be whole. So a reduction
//! in hand gets [`GRACE`] to end by itself, in whatever way, before the group is aborted; a group that has nothing in hand is left alone, because its
//! abort would end what the other members have in hand. The next quorum is a new epoch.

use std::time::Duration;

use ftcore::Epoch;

/// For what is in hand when its epoch ends. Long enough for a rank that has to wait for a core; a group that sees a loss itself fails before.
pub const GRACE: Duration = Duration::from_millis(250);

/// What one rank has heard of the ends of epochs.
#[derive(Debug, Clone, Default)]
pub struct Ends {
    /// The newest epoch that was ended from elsewhere, and why; ids only grow, so that one is enough.
    newest: Option<(Epoch, String)>,
}

impl Ends {
    /// The epoch is over. Kept although the rank is in another one: the notice may overtake the answer that names the epoch.
    pub fn hear(&mut self, epoch: Epoch, why: String) {
        // Of several reasons for one epoch the last tells most: who is gone, after who said so.
        if self.newest.as_ref().is_none_or(|(newest, _)| *newest <= epoch) {
            self.newest = Some((epoch, why));
        }
    }

    /// Why `epoch` is over, once it was said.
    pub fn why_over(&self, epoch: Epoch) -> Option<&str> {
        let (_, why) = self.newest.as_ref().filter(|(newest, _)| *newest >= epoch)?;
        Some(why)
    }

    /// To be asked with each notice and with each reduction that begins: after which time the group of `live` is aborted, if its reductions
    /// have not ended by then. `None`: it is left alone.
    pub fn settle(&self, live: Epoch, is_in_hand: bool) -> Option<Duration> {
        self.why_over(live).filter(|_| is_in_hand).map(|_| GRACE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_hand_when_its_epoch_ends_gets_time_and_an_idle_group_is_left_alone() {
        let mut ends = Ends::default();
        assert_eq!(ends.settle(Epoch(7), true), None);
        ends.hear(Epoch(6), "a is gone".into());
        assert_eq!(ends.settle(Epoch(7), true), None, "an earlier epoch is no notice");
        ends.hear(Epoch(7), "b is gone".into());
        assert_eq!(ends.settle(Epoch(7), true), Some(GRACE));
        assert_eq!(ends.settle(Epoch(7), false), None);
        assert_eq!(ends.settle(Epoch(8), true), None);
    }

    #[test]
    fn the_newest_epoch_counts_and_of_several_reasons_the_last() {
        let mut ends = Ends::default();
        ends.hear(Epoch(7), "a reported".into());
        ends.hear(Epoch(7), "b is gone".into());
        ends.hear(Epoch(6), "late".into());
        assert_eq!(ends.why_over(Epoch(7)), Some("b is gone"));
        assert_eq!(
            ends.why_over(Epoch(5)),
            Some("b is gone"),
            "epochs before it are over, too"
        );
        assert_eq!(ends.why_over(Epoch(8)), None);
    }
}

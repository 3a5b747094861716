//! Configuration of a DiLoCo run and its constraints, each with a message that says what to change.

use std::fmt;
use std::time::Duration;

use ftcore::{Error, Result, Step};
use protocol::training::RoundRules;

use crate::Backup;
use crate::optim::{AdamW, Optimizer, Sgd};

/// How parameters are dealt to fragments, in units of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pattern {
    /// Neighbouring layers together.
    Sequential,
    /// Layer l goes to fragment l mod P: similar loss, better overlap (arXiv 2501.18512).
    #[default]
    Strided,
}

/// The outer optimizer; every fragment gets its own (L05).
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OuterOptimizer {
    /// Plain SGD.
    Sgd {
        /// Learning rate; 1 adopts the mean of the replicas.
        lr: f32,
    },
    /// SGD with Nesterov momentum: the usual choice.
    Nesterov {
        /// Learning rate.
        lr: f32,
        /// Momentum.
        momentum: f32,
    },
    /// AdamW without weight decay.
    AdamW {
        /// Learning rate.
        lr: f32,
    },
}

impl OuterOptimizer {
    pub(crate) fn build(self) -> Box<dyn Optimizer> {
        match self {
            Self::Sgd { lr } => Box::new(Sgd::new(lr, 0.0, false)),
            Self::Nesterov { lr, momentum } => Box::new(Sgd::new(lr, momentum, true)),
            Self::AdamW { lr } => Box::new(AdamW::new(lr, 0.0)),
        }
    }

    /// The name without the numbers: what a saved state of it fits.
    pub(crate) fn kind(self) -> &'static str {
        match self {
            Self::Sgd { .. } => "sgd",
            Self::Nesterov { .. } => "nesterov",
            Self::AdamW { .. } => "adamw",
        }
    }

    fn momentum(self) -> f32 {
        match self {
            Self::Nesterov { momentum, .. } => momentum,
            Self::Sgd { .. } | Self::AdamW { .. } => 0.0,
        }
    }

    fn lr(self) -> f32 {
        match self {
            Self::Sgd { lr } | Self::Nesterov { lr, .. } | Self::AdamW { lr } => lr,
        }
    }
}

impl fmt::Display for OuterOptimizer {
    /// Equal texts are equal optimizers.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} with rate {}", self.kind(), self.lr())?;
        match self {
            Self::Nesterov { momentum, .. } => write!(f, " and momentum {momentum}"),
            Self::Sgd { .. } | Self::AdamW { .. } => Ok(()),
        }
    }
}

/// A DiLoCo run. The names follow arXiv 2501.18512.
///
/// ```
/// use oxccl_diloco::DilocoConfig;
///
/// let config = DilocoConfig {
///     sync_every: 100, // inner steps between two averages of a fragment
///     fragments: 4,
///     ..DilocoConfig::for_rounds(50)
/// };
/// config.validate()?;
/// // As published: everything at once, nothing overlapped.
/// assert_eq!(DilocoConfig::diloco(500).fragments, 1);
/// # Ok::<(), ftcore::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct DilocoConfig {
    /// H: every fragment is synchronised once in so many inner steps.
    pub sync_every: u64,
    /// P: the number of fragments.
    pub fragments: usize,
    /// How layers are dealt to fragments.
    pub pattern: Pattern,
    /// τ: inner steps between sending a fragment and applying the result.
    pub delay: u64,
    /// α: the share of the local value that is kept when the result is applied; 0 adopts the global value.
    pub mixing: f32,
    /// Eager updates (arXiv 2502.12996): the reduction of a round overlaps with all inner steps of the next one. When a
    /// fragment is sent, the local parameters take over all that is known by then: the outer state of the last finished
    /// round, moved on by this replica's own part (1/M) of the mean that is on its way. The outer state holds finished
    /// rounds only and stays bitwise equal on all replicas. With plain SGD this is the published rule exactly; with
    /// momentum the published one also lets each replica's own parts into its momentum. Needs `delay` 0 and `mixing` 0.
    pub eager: bool,
    /// The outer optimizer, the same on all replicas: one that heals compares it.
    pub outer: OuterOptimizer,
    /// Where the copies of the parameters lie that a round starts from and a failed commit goes back to. No bit depends on it.
    pub backup: Backup,
    /// Values per all-reduce, so that a fragment travels in pieces that overlap. In elements.
    pub bucket_elements: usize,
    /// The number of rounds with data, after which the run is closed. `None`: the training loop decides, the same on
    /// every replica.
    pub rounds: Option<i64>,
    /// How long a call may wait for the others for the sake of one round: its quorum, its commit and its repetitions together.
    pub round_timeout: Duration,
}

impl Default for DilocoConfig {
    /// H = 32, two strided fragments, τ = 1, α = 0.5, Nesterov 0.4 / 0.9, backup copies on the host.
    fn default() -> Self {
        Self {
            sync_every: 32,
            fragments: 2,
            pattern: Pattern::Strided,
            delay: 1,
            mixing: 0.5,
            eager: false,
            outer: OuterOptimizer::Nesterov {
                lr: 0.4,
                momentum: 0.9,
            },
            backup: Backup::Host,
            bucket_elements: 1 << 18,
            rounds: None,
            round_timeout: Duration::from_secs(600),
        }
    }
}

impl DilocoConfig {
    /// Streaming DiLoCo with the usual values, for a run of so many rounds.
    pub fn for_rounds(rounds: i64) -> Self {
        Self {
            rounds: Some(rounds),
            ..Self::default()
        }
    }

    /// DiLoCo as first published (arXiv 2311.08105): everything at once, no overlap, Nesterov 0.7 / 0.9.
    pub fn diloco(sync_every: u64) -> Self {
        Self {
            sync_every,
            fragments: 1,
            delay: 0,
            mixing: 0.0,
            outer: OuterOptimizer::Nesterov {
                lr: 0.7,
                momentum: 0.9,
            },
            ..Self::default()
        }
    }

    /// Plain parameter averaging every `sync_every` steps.
    pub fn local_sgd(sync_every: u64) -> Self {
        Self {
            outer: OuterOptimizer::Sgd { lr: 1.0 },
            ..Self::diloco(sync_every)
        }
    }

    /// Inner steps between two rounds: H / P.
    pub fn round_steps(&self) -> u64 {
        self.sync_every / (self.fragments.max(1) as u64)
    }

    /// What the order of the rounds follows from.
    pub(crate) fn rules(&self) -> RoundRules {
        RoundRules {
            round_steps: self.round_steps(),
            delay: self.delay,
            eager: self.eager,
            last: self.rounds.map(Step),
        }
    }

    /// Checks every constraint.
    pub fn validate(&self) -> Result<()> {
        let bad = |text: String| Err(Error::invalid(text));
        let p = self.fragments as u64;
        if p == 0 {
            return bad("fragments must be at least 1".into());
        }
        if self.sync_every < p {
            return bad(format!(
                "sync_every {} is smaller than fragments {p}: one fragment is synchronised at a time, so raise sync_every \
                 to at least {p} or use fewer fragments",
                self.sync_every
            ));
        }
        if !self.sync_every.is_multiple_of(p) {
            return bad(format!(
                "sync_every {} is not a multiple of fragments {p}; the nearest are {} and {}",
                self.sync_every,
                self.sync_every / p * p,
                self.sync_every.div_ceil(p) * p
            ));
        }
        if self.delay >= self.round_steps() {
            return bad(format!(
                "delay {} must be smaller than sync_every / fragments = {}: a fragment must be applied before the next \
                 one is sent",
                self.delay,
                self.round_steps()
            ));
        }
        if !(0.0..=1.0).contains(&self.mixing) {
            return bad(format!(
                "mixing {} must be between 0 (adopt the global value) and 1 (keep the local one)",
                self.mixing
            ));
        }
        if self.eager && (self.delay > 0 || self.mixing > 0.0) {
            return bad(format!(
                "eager updates take the place of delay {} and mixing {}: set both to 0",
                self.delay, self.mixing
            ));
        }
        if !(self.outer.lr().is_finite() && self.outer.lr() > 0.0) {
            return bad(format!(
                "the outer learning rate {} must be a positive number",
                self.outer.lr()
            ));
        }
        if !(0.0..1.0).contains(&self.outer.momentum()) {
            return bad(format!(
                "the outer momentum {} must be at least 0 and below 1: from 1 on it never forgets",
                self.outer.momentum()
            ));
        }
        if self.rounds.is_some_and(|n| n < 1) {
            return bad(format!(
                "rounds {} must be at least 1, or None if the training loop decides",
                self.rounds.unwrap_or_default()
            ));
        }
        if self.bucket_elements == 0 {
            return bad("bucket_elements must be at least 1".into());
        }
        if self.round_timeout.is_zero() {
            return bad("round_timeout must be longer than zero: a round waits for other replicas".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_constraint_has_a_message_that_says_what_to_change() {
        let ok = DilocoConfig::default();
        ok.validate().unwrap();
        let cases = [
            (
                DilocoConfig {
                    fragments: 0,
                    ..ok.clone()
                },
                "at least 1",
            ),
            (
                DilocoConfig {
                    sync_every: 1,
                    ..ok.clone()
                },
                "raise sync_every",
            ),
            (
                DilocoConfig {
                    sync_every: 33,
                    ..ok.clone()
                },
                "32 and 34",
            ),
            (
                DilocoConfig {
                    delay: 16,
                    ..ok.clone()
                },
                "must be smaller than sync_every / fragments = 16",
            ),
            (
                DilocoConfig {
                    mixing: 1.5,
                    ..ok.clone()
                },
                "between 0",
            ),
            (
                DilocoConfig {
                    outer: OuterOptimizer::Sgd { lr: 0.0 },
                    ..ok.clone()
                },
                "positive",
            ),
            (
                DilocoConfig {
                    outer: OuterOptimizer::Nesterov {
                        lr: 0.4,
                        momentum: 1.0,
                    },
                    ..ok.clone()
                },
                "below 1",
            ),
            (
                DilocoConfig {
                    mixing: f32::NAN,
                    ..ok.clone()
                },
                "between 0",
            ),
            (
                DilocoConfig {
                    rounds: Some(0),
                    ..ok.clone()
                },
                "at least 1, or None",
            ),
            (
                DilocoConfig {
                    eager: true,
                    ..ok.clone()
                },
                "set both to 0",
            ),
            (
                DilocoConfig {
                    bucket_elements: 0,
                    ..ok.clone()
                },
                "bucket_elements",
            ),
            (
                DilocoConfig {
                    round_timeout: Duration::ZERO,
                    ..ok.clone()
                },
                "longer than zero",
            ),
            (
                DilocoConfig {
                    outer: OuterOptimizer::AdamW { lr: f32::INFINITY },
                    ..ok.clone()
                },
                "positive",
            ),
            (
                DilocoConfig {
                    mixing: -0.5,
                    ..ok.clone()
                },
                "between 0",
            ),
        ];
        for (config, text) in cases {
            let e = config.validate().unwrap_err().to_string();
            assert!(e.contains(text), "{e}");
        }
    }
}

//! Error feedback of a quantised group as a part of the rounds and of the state: a round begins, commits or rolls back its residuals
//! ([`quant::ErrorFeedback`]), and they travel with what the replica is made of.

use std::sync::Arc;

use ftcore::Result;
use quant::ErrorFeedback;
use replica::StateDict;

/// The residuals of this replica's rank; without error feedback there are none.
#[derive(Default)]
pub(crate) struct Feedback {
    residuals: Option<Arc<ErrorFeedback>>,
}

/// Under this the residuals stand in a state.
const PREFIX: &str = "feedback/";

impl Feedback {
    pub(crate) fn new(residuals: Arc<ErrorFeedback>) -> Self {
        Self {
            residuals: Some(residuals),
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.residuals.is_some()
    }

    /// Begins an attempt at a round of `fragment`.
    pub(crate) fn begin(&self, fragment: usize) {
        if let Some(residuals) = &self.residuals {
            residuals.begin(&format!("fragment.{fragment}"));
        }
    }

    /// Ends the attempt.
    pub(crate) fn end(&self, committed: bool) {
        match &self.residuals {
            Some(residuals) if committed => residuals.commit(),
            Some(residuals) => residuals.rollback(),
            None => {}
        }
    }

    pub(crate) fn save(&self, out: &mut StateDict) -> Result<()> {
        let all = self.residuals.iter().flat_map(|d| d.state());
        all.into_iter().try_for_each(|(name, residuals)| {
            out.insert_f32(format!("{PREFIX}{name}"), &[residuals.len()], &residuals)
        })
    }

    /// Takes over the residuals in `from`: this replica's `own`, or those of the source that it heals from.
    pub(crate) fn load(&self, from: &StateDict, own: bool) -> Result<()> {
        let Some(residuals) = &self.residuals else {
            return Ok(());
        };
        let saved = from.iter().filter_map(|(key, _)| {
            let name = key.strip_prefix(PREFIX)?;
            Some(from.get_f32(key).map(|values| (name.to_string(), values)))
        });
        let saved = saved.collect::<Result<Vec<_>>>()?;
        if own {
            residuals.load(saved)
        } else {
            residuals.adopt(saved)
        }
    }
}

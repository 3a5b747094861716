//! What a replica of DiLoCo is made of, and how it travels to one that heals.

use std::sync::Arc;

use ftcore::{Error, ErrorKind, Result};
use protocol::training::Rounds;
use quant::ErrorFeedback;
use replica::{State, StateDict, save_beside};

use crate::backup::Copies;
use crate::optim::Optimizer;
use crate::{FragmentPlan, OuterOptimizer, Parameters};

/// One fragment's outer state.
pub(crate) struct Fragment {
    /// The global parameters after the last commit, one slot per member.
    pub(crate) global: Copies,
    /// Shared with the thread on which a round's outer step is made, on a copy.
    pub(crate) optimizer: Arc<dyn Optimizer>,
    /// With eager updates: where the local parameters began the round in flight, one slot per member. It differs
    /// between replicas.
    pub(crate) base: Option<Copies>,
}

/// `optimizer` for a step: if it is shared, the caller goes on with a copy.
pub(crate) fn own(optimizer: &mut Arc<dyn Optimizer>) -> Result<&mut dyn Optimizer> {
    if Arc::get_mut(optimizer).is_none() {
        *optimizer = optimizer.boxed_clone().into();
    }
    Arc::get_mut(optimizer)
        .ok_or_else(|| Error::new(ErrorKind::Internal, "an optimizer is shared that was just made"))
}

/// The state that travels to a healing replica: parameters, global copies, outer optimizers, position in the round, and whatever the
/// training loop adds. In a replica's own checkpoints also what error feedback owes.
pub(crate) struct Whole<'a, P> {
    pub(crate) params: &'a mut P,
    pub(crate) plan: &'a FragmentPlan,
    pub(crate) outer: OuterOptimizer,
    pub(crate) fragments: &'a mut [Fragment],
    pub(crate) rounds: &'a mut Rounds<Vec<f32>>,
    pub(crate) feedback: Option<&'a ErrorFeedback>,
    /// Values per all-reduce: residuals are kept by all-reduce.
    pub(crate) bucket_elements: usize,
    /// True if the state is for this replica itself (its checkpoint), false if it is healed from.
    pub(crate) own: bool,
    pub(crate) inner: &'a mut dyn State,
}

const LAYOUT: &str = "diloco.layout";
const OUTER: &str = "diloco.outer";
/// Under this the residuals of error feedback stand in a replica's own state.
const FEEDBACK: &str = "feedback";

impl<P: Parameters> Whole<'_, P> {
    /// Which parameters are in which fragment, whether updates are eager and errors fed back, and what steps on the global copies, in words
    /// that are compared.
    fn layout(&self) -> String {
        let parts: Vec<String> = (0..self.plan.len())
            .map(|f| {
                let members: Vec<String> = self
                    .plan
                    .members(f)
                    .iter()
                    .map(|&i| format!("{}[{}]", self.params.name(i), self.params.count(i)))
                    .collect();
                members.join(" ")
            })
            .collect();
        let eager = self.fragments.iter().any(|f| f.base.is_some());
        let updates = if eager { "eager" } else { "plain" };
        let feedback = if self.feedback.is_some() {
            format!("error-feedback-per-{}", self.bucket_elements)
        } else {
            "no-error-feedback".to_string()
        };
        let outer = self.outer.kind();
        format!("{updates} {feedback} {outer} {}", parts.join(" | "))
    }

    /// Refuses a state that would not go on here as it does where it comes from. A replica's own may: a rate can be changed between two
    /// runs, on all replicas.
    fn check(&self, from: &StateDict) -> Result<()> {
        let said = |key| from.metadata().get(key).map_or("", String::as_str);
        let (own, theirs) = (self.layout(), said(LAYOUT));
        if own != theirs {
            return Err(Error::invalid(format!(
                "the source's parameters or fragments are not laid out like this replica's: {}. All replicas of a run \
                 need the same model, fragments, outer optimizer and error feedback",
                layout_difference(&own, theirs)
            )));
        }
        let (own, theirs) = (self.outer.to_string(), said(OUTER));
        if self.own || own == theirs {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "the outer optimizer here is {own}, at the source {theirs}: each round would take the replicas further apart. Give all \
             replicas of a run the same"
        )))
    }

    /// The outer optimizers as they stand in `from`, each tried on values of its fragment's sizes.
    fn optimizers(&self, from: &StateDict) -> Result<Vec<Box<dyn Optimizer>>> {
        let loaded = self.fragments.iter().enumerate().map(|(f, fragment)| {
            let mut optimizer = fragment.optimizer.boxed_clone();
            optimizer.load(&outer_prefix(f), from)?;
            let mut trial = optimizer.boxed_clone();
            trial.begin_step();
            for (slot, count) in fragment.global.counts().enumerate() {
                let zeros = vec![0.0; count];
                trial.update(slot, &mut zeros.clone(), &zeros).map_err(|e| {
                    let text = format!(
                        "the outer optimizer's state does not fit fragment {f}: {}",
                        e.message()
                    );
                    Error::new(ErrorKind::Corrupt, text)
                })?;
            }
            Ok(optimizer)
        });
        loaded.collect()
    }
}

/// Under this the outer optimizer of a fragment stands in a state.
fn outer_prefix(fragment: usize) -> String {
    format!("outer.{fragment}")
}

/// The first place where two layouts differ, in words.
fn layout_difference(own: &str, theirs: &str) -> String {
    let (mut a, mut b) = (own.split(' '), theirs.split(' '));
    loop {
        match (a.next(), b.next()) {
            (Some(x), Some(y)) if x == y => {}
            (x, y) => {
                return format!(
                    "here {}, at the source {}",
                    x.unwrap_or("nothing"),
                    y.unwrap_or("nothing")
                );
            }
        }
    }
}

impl<P: Parameters> State for Whole<'_, P> {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        out.set_metadata(LAYOUT, self.layout());
        out.set_metadata(OUTER, self.outer.to_string());
        let count = self.rounds.count(self.own);
        out.insert_i64s("diloco/count", &[i64::try_from(count).unwrap_or(i64::MAX)])?;
        for i in 0..self.params.len() {
            let mut saved = Ok(());
            let name = format!("param/{}", self.params.name(i));
            self.params.read(i, &mut |values| {
                saved = out.insert_f32(name.clone(), &[values.len()], values)
            })?;
            saved?;
        }
        for (f, fragment) in self.fragments.iter().enumerate() {
            let copies = [
                ("global", Some(&fragment.global)),
                ("base", fragment.base.as_ref()),
            ];
            for (kind, copies) in copies.into_iter().filter_map(|(kind, c)| Some((kind, c?))) {
                for (slot, &i) in self.plan.members(f).iter().enumerate() {
                    let name = format!("{kind}/{}", self.params.name(i));
                    if let Some(tensor) = copies.shared(slot) {
                        out.insert_shared(name, tensor)?;
                        continue;
                    }
                    copies.read(slot, &mut |values| {
                        out.insert_f32(name.clone(), &[values.len()], values)
                    })?;
                }
            }
            fragment.optimizer.save(&outer_prefix(f), out)?;
        }
        // Each replica pays its own residuals: to one that heals they would be paid twice.
        if let Some(feedback) = self.feedback.filter(|_| self.own) {
            out.insert_f32s(FEEDBACK, &feedback.state())?;
        }
        save_beside(&*self.inner, out)
    }

    fn load(&mut self, from: &StateDict) -> Result<()> {
        // Everything is checked and read before anything is written, so that a bad state changes nothing.
        self.check(from)?;
        let count = from
            .get_i64s("diloco/count")?
            .first()
            .copied()
            .and_then(|c| u64::try_from(c).ok());
        let count =
            count.ok_or_else(|| Error::new(ErrorKind::Corrupt, "diloco/count is missing or negative"))?;
        let mut locals = Vec::with_capacity(self.params.len());
        let mut globals = Vec::with_capacity(self.params.len());
        for i in 0..self.params.len() {
            locals.push(
                from.get_f32_shaped(&format!("param/{}", self.params.name(i)), &[self.params.count(i)])?,
            );
            globals.push(from.get_f32_shaped(
                &format!("global/{}", self.params.name(i)),
                &[self.params.count(i)],
            )?);
        }
        let mut bases = Vec::with_capacity(self.fragments.len());
        for (f, fragment) in self.fragments.iter().enumerate() {
            let base = fragment.base.as_ref().map(|_| {
                let names = self.plan.members(f).iter();
                names
                    .map(|&i| {
                        from.get_f32_shaped(&format!("base/{}", self.params.name(i)), &[self.params.count(i)])
                    })
                    .collect::<Result<Vec<_>>>()
            });
            bases.push(base.transpose()?);
        }
        let optimizers = self.optimizers(from)?;
        if let Some(feedback) = self.feedback {
            // A replica that heals owes nothing from then on: what its source owes the source pays, and what it owed itself may be paid in the rounds
            // that it missed.
            feedback.load(match self.own {
                true => from.f32s_under(FEEDBACK)?,
                false => Vec::new(),
            })?;
        }
        // From here on only the training loop's own state, or a device, can say no.
        let inner = self.inner.load(from);
        let written = inner.and_then(|()| self.write(&locals, &globals, &bases, optimizers));
        self.rounds.loaded(count, written)
    }
}

impl<P: Parameters> Whole<'_, P> {
    /// `locals` and `globals` by parameter, `bases` by fragment and slot.
    fn write(
        &mut self,
        locals: &[Vec<f32>],
        globals: &[Vec<f32>],
        bases: &[Option<Vec<Vec<f32>>>],
        optimizers: Vec<Box<dyn Optimizer>>,
    ) -> Result<()> {
        for (i, values) in locals.iter().enumerate() {
            self.params.write(i, &mut |p| p.copy_from_slice(values))?;
        }
        for ((f, fragment), base) in self.fragments.iter_mut().enumerate().zip(bases) {
            for (slot, &i) in self.plan.members(f).iter().enumerate() {
                if let Some(values) = globals.get(i) {
                    fragment.global.store(slot, values)?;
                }
            }
            if let Some(copies) = &mut fragment.base {
                for (slot, values) in base.iter().flatten().enumerate() {
                    copies.store(slot, values)?;
                }
            }
        }
        for (fragment, optimizer) in self.fragments.iter_mut().zip(optimizers) {
            fragment.optimizer = optimizer.into();
        }
        Ok(())
    }
}

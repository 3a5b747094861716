//! The arithmetic of a round on one fragment: its outer gradient, the outer step, and what the local parameters take of it.
//!
//! One tensor at a time: copies may lie on a device ([`Copies`](crate::backup::Copies)), and so may the parameters.

use ftcore::{Error, ErrorKind, Result};
use replica::Replica;

use super::reduced::{Reduced, Stepped};
use crate::state::{Fragment, own};
use crate::{Diloco, Parameters};

impl<R: Replica, P: Parameters> Diloco<R, P> {
    /// `global − local` over the members of `fragment`, flat; with eager updates `base − local`.
    pub(super) fn outer_gradient(&mut self, fragment: usize) -> Result<Vec<f32>> {
        let mut flat = self.scratch.flat();
        if let Some(state) = self.fragments.get(fragment) {
            flat.reserve(state.global.counts().sum());
            let from = state.base.as_ref().unwrap_or(&state.global);
            for (slot, &i) in self.plan.members(fragment).iter().enumerate() {
                from.read(slot, &mut |from| {
                    self.params.read(i, &mut |local| {
                        flat.extend(from.iter().zip(local).map(|(g, l)| g - l))
                    })
                })?;
            }
        }
        Ok(flat)
    }

    /// After a heal: sets the local parameters of all fragments to the global ones, but for that of the present step, whose outer gradient is a copy of
    /// the source's. What the source sends of the inner steps that it made is then not sent from here as well.
    pub(super) fn start_at_global(&mut self) -> Result<()> {
        let in_flight = self.fragment_at(self.step());
        self.show_global(Some(in_flight))?;
        for (f, fragment) in self.fragments.iter_mut().enumerate() {
            let Some(base) = fragment.base.as_mut().filter(|_| f != in_flight) else {
                continue;
            };
            for slot in 0..self.plan.members(f).len() {
                base.store(slot, &fragment.global.get(slot)?)?;
            }
        }
        Ok(())
    }

    /// Lets the local parameters of `fragment` go on from the outer step that this replica's `own` part of the mean alone
    /// would make. The outer state itself stays as it is.
    pub(super) fn look_ahead(&mut self, fragment: usize, own: &[f32]) -> Result<()> {
        let Some(state) = self.fragments.get_mut(fragment) else {
            return Ok(());
        };
        let Some(base) = &mut state.base else {
            return Ok(());
        };
        let mut optimizer = state.optimizer.boxed_clone();
        optimizer.begin_step();
        let mut rest = own;
        for (slot, &i) in self.plan.members(fragment).iter().enumerate() {
            let mut values = state.global.get(slot)?;
            let part = next_part(&mut rest, values.len())?;
            optimizer.update(slot, &mut values, part)?;
            self.params
                .write(i, &mut |local| local.copy_from_slice(&values))?;
            base.store(slot, &values)?;
        }
        Ok(())
    }

    /// The outer step on `fragment`, if it was not made, and then the mix into the local parameters.
    pub(super) fn outer_step(&mut self, fragment: usize, reduced: Reduced) -> Result<()> {
        let Reduced { mean, stepped, .. } = reduced;
        if mean.is_empty() {
            return Ok(());
        }
        let Some(state) = self.fragments.get_mut(fragment) else {
            return Ok(());
        };
        let Fragment {
            global, optimizer, ..
        } = state;
        // With eager updates the local parameters take the result over when their next part of it is added (`look_ahead`).
        // A copy of another replica's inner steps is not kept beside its own.
        let alpha = if self.rounds.is_copy() {
            0.0
        } else {
            self.config.mixing
        };
        let alpha = (!self.config.eager).then_some(alpha);
        let members = self.plan.members(fragment);
        let mut mix_in = |i, global: &[f32]| match alpha {
            Some(alpha) => self.params.write(i, &mut |local| mix(local, global, alpha)),
            None => Ok(()),
        };
        if let Some(stepped) = stepped {
            let mut stale = Stepped {
                optimizer: std::mem::replace(optimizer, stepped.optimizer),
                global: Vec::with_capacity(members.len()),
            };
            for ((slot, &i), tensor) in members.iter().enumerate().zip(stepped.global) {
                mix_in(i, tensor.as_slice()?)?;
                stale.global.extend(global.replace(slot, tensor)?);
            }
            self.scratch.keep_stale(stale);
            self.scratch.keep([mean].into_iter());
            return Ok(());
        }
        let optimizer = own(optimizer)?;
        optimizer.begin_step();
        let counts: Vec<usize> = global.counts().collect();
        let mut rest = mean.as_slice();
        for ((slot, &i), count) in members.iter().enumerate().zip(counts) {
            let part = next_part(&mut rest, count)?;
            global.update(slot, &mut |global| {
                optimizer.update(slot, global, part)?;
                mix_in(i, global)
            })?;
        }
        self.scratch.keep([mean].into_iter());
        Ok(())
    }
}

/// `local` becomes `α · local + (1 − α) · global`.
fn mix(local: &mut [f32], global: &[f32], alpha: f32) {
    for (l, g) in local.iter_mut().zip(global) {
        // α = 0 must give the global value exactly, and α = 1 the local one.
        *l = if alpha == 0.0 {
            *g
        } else {
            alpha * *l + (1.0 - alpha) * *g
        };
    }
}

/// Takes the next `count` values off `rest`.
pub(super) fn next_part<'a>(rest: &mut &'a [f32], count: usize) -> Result<&'a [f32]> {
    let (part, tail) = rest.split_at_checked(count).ok_or_else(|| {
        Error::new(
            ErrorKind::Internal,
            "the reduced fragment is shorter than its parameters",
        )
    })?;
    *rest = tail;
    Ok(part)
}

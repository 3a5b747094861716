//! Optimizers over slices: SGD, Nesterov momentum and AdamW, with state that can be checkpointed.
//!
//! They serve as outer optimizers of DiLoCo and as inner ones of a training loop. Each numbered tensor ("slot") has its
//! own state, made on first use. Updates are element by element in a fixed order: the same inputs give the same bits.

use std::any::Any;
use std::collections::BTreeMap;

use ftcore::{Error, Result};
use replica::StateDict;

/// A first-order optimizer.
pub trait Optimizer: Any + Send + Sync {
    /// Begins a step over any number of slots (advances step counts).
    fn begin_step(&mut self);
    /// Updates `param` by `grad`; both have the slot's number of elements, which never changes.
    fn update(&mut self, slot: usize, param: &mut [f32], grad: &[f32]) -> Result<()>;
    /// A copy with the same state.
    fn boxed_clone(&self) -> Box<dyn Optimizer>;
    /// Becomes a copy of `other`, in the memory that it has already. False, and nothing is changed, if that is another kind of optimizer.
    fn assign(&mut self, other: &dyn Optimizer) -> bool;
    /// Adds the state under `prefix/`.
    fn save(&self, prefix: &str, out: &mut StateDict) -> Result<()>;
    /// Replaces the state by what stands under `prefix/`.
    fn load(&mut self, prefix: &str, from: &StateDict) -> Result<()>;
}

fn same_len(slot: usize, param: &[f32], grad: &[f32], state: &[f32]) -> Result<()> {
    if param.len() == grad.len() && param.len() == state.len() {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "slot {slot}: parameter, gradient and state have {}, {} and {} elements; they must be equal",
        param.len(),
        grad.len(),
        state.len()
    )))
}

/// A copy of `from`, in the vectors that are there.
fn assign_slots(to: &mut BTreeMap<usize, Vec<f32>>, from: &BTreeMap<usize, Vec<f32>>) {
    to.retain(|slot, _| from.contains_key(slot));
    for (slot, values) in from {
        to.entry(*slot).or_default().clone_from(values);
    }
}

fn save_slots(
    prefix: &str,
    name: &str,
    slots: &BTreeMap<usize, Vec<f32>>,
    out: &mut StateDict,
) -> Result<()> {
    slots
        .iter()
        .try_for_each(|(slot, v)| out.insert_f32(format!("{prefix}/{name}.{slot}"), &[v.len()], v))
}

fn load_slots(prefix: &str, name: &str, from: &StateDict) -> Result<BTreeMap<usize, Vec<f32>>> {
    let start = format!("{prefix}/{name}.");
    let mut slots = BTreeMap::new();
    for (key, _) in from.iter() {
        if let Some(slot) = key.strip_prefix(&start).and_then(|s| s.parse().ok()) {
            slots.insert(slot, from.get_f32(key)?);
        }
    }
    Ok(slots)
}

/// Stochastic gradient descent, with momentum in PyTorch's form: `b ← μ·b + g`, then `θ ← θ − η·b`, or with Nesterov
/// `θ ← θ − η·(g + μ·b)`. With `momentum` 0 there is no state.
#[derive(Debug, Clone)]
pub struct Sgd {
    /// η.
    pub lr: f32,
    /// μ.
    pub momentum: f32,
    /// Look ahead.
    pub nesterov: bool,
    velocity: BTreeMap<usize, Vec<f32>>,
}

impl Sgd {
    /// See the type.
    pub fn new(lr: f32, momentum: f32, nesterov: bool) -> Self {
        Self {
            lr,
            momentum,
            nesterov,
            velocity: BTreeMap::new(),
        }
    }
}

impl Optimizer for Sgd {
    fn begin_step(&mut self) {}

    fn update(&mut self, slot: usize, param: &mut [f32], grad: &[f32]) -> Result<()> {
        if self.momentum == 0.0 {
            same_len(slot, param, grad, grad)?;
            param.iter_mut().zip(grad).for_each(|(p, g)| *p -= self.lr * g);
            return Ok(());
        }
        let velocity = self
            .velocity
            .entry(slot)
            .or_insert_with(|| vec![0.0; param.len()]);
        same_len(slot, param, grad, velocity)?;
        let (lr, mu) = (self.lr, self.momentum);
        for ((p, g), b) in param.iter_mut().zip(grad).zip(velocity) {
            *b = mu * *b + g;
            let direction = if self.nesterov { g + mu * *b } else { *b };
            *p -= lr * direction;
        }
        Ok(())
    }

    fn boxed_clone(&self) -> Box<dyn Optimizer> {
        Box::new(self.clone())
    }

    fn assign(&mut self, other: &dyn Optimizer) -> bool {
        let Some(other) = (other as &dyn Any).downcast_ref::<Self>() else {
            return false;
        };
        (self.lr, self.momentum, self.nesterov) = (other.lr, other.momentum, other.nesterov);
        assign_slots(&mut self.velocity, &other.velocity);
        true
    }

    fn save(&self, prefix: &str, out: &mut StateDict) -> Result<()> {
        save_slots(prefix, "velocity", &self.velocity, out)
    }

    fn load(&mut self, prefix: &str, from: &StateDict) -> Result<()> {
        self.velocity = load_slots(prefix, "velocity", from)?;
        Ok(())
    }
}

/// AdamW (arXiv 1711.05101): Adam with decoupled weight decay and bias correction.
#[derive(Debug, Clone)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    steps: i64,
    first: BTreeMap<usize, Vec<f32>>,
    second: BTreeMap<usize, Vec<f32>>,
}

impl AdamW {
    /// AdamW with β = (0.9, 0.99), ε = 1e-8.
    pub fn new(lr: f32, weight_decay: f32) -> Self {
        Self {
            lr,
            beta1: 0.9,
            beta2: 0.99,
            eps: 1e-8,
            weight_decay,
            steps: 0,
            first: BTreeMap::new(),
            second: BTreeMap::new(),
        }
    }

    /// Steps begun so far.
    pub fn steps(&self) -> i64 {
        self.steps
    }
}

impl Optimizer for AdamW {
    fn begin_step(&mut self) {
        self.steps += 1;
    }

    fn update(&mut self, slot: usize, param: &mut [f32], grad: &[f32]) -> Result<()> {
        let first = self.first.entry(slot).or_insert_with(|| vec![0.0; param.len()]);
        let second = self.second.entry(slot).or_insert_with(|| vec![0.0; param.len()]);
        same_len(slot, param, grad, first)?;
        same_len(slot, param, grad, second)?;
        let t = i32::try_from(self.steps.max(1)).unwrap_or(i32::MAX);
        // In f64: at large t the corrections are close to 1 and f32 powers drift.
        let c1 = (1.0 / (1.0 - f64::from(self.beta1).powi(t))) as f32;
        let c2 = (1.0 / (1.0 - f64::from(self.beta2).powi(t))) as f32;
        let (b1, b2, lr, eps, decay) = (
            self.beta1,
            self.beta2,
            self.lr,
            self.eps,
            1.0 - self.lr * self.weight_decay,
        );
        for (((p, g), m), v) in param.iter_mut().zip(grad).zip(first).zip(second) {
            *m = b1 * *m + (1.0 - b1) * g;
            *v = b2 * *v + (1.0 - b2) * g * g;
            *p = *p * decay - lr * (*m * c1) / ((*v * c2).sqrt() + eps);
        }
        Ok(())
    }

    fn boxed_clone(&self) -> Box<dyn Optimizer> {
        Box::new(self.clone())
    }

    fn assign(&mut self, other: &dyn Optimizer) -> bool {
        let Some(other) = (other as &dyn Any).downcast_ref::<Self>() else {
            return false;
        };
        (self.lr, self.beta1, self.beta2) = (other.lr, other.beta1, other.beta2);
        (self.eps, self.weight_decay, self.steps) = (other.eps, other.weight_decay, other.steps);
        assign_slots(&mut self.first, &other.first);
        assign_slots(&mut self.second, &other.second);
        true
    }

    fn save(&self, prefix: &str, out: &mut StateDict) -> Result<()> {
        out.insert_i64s(format!("{prefix}/steps"), &[self.steps])?;
        save_slots(prefix, "first", &self.first, out)?;
        save_slots(prefix, "second", &self.second, out)
    }

    fn load(&mut self, prefix: &str, from: &StateDict) -> Result<()> {
        let steps = from.get_i64s(&format!("{prefix}/steps"))?;
        let (first, second) = (
            load_slots(prefix, "first", from)?,
            load_slots(prefix, "second", from)?,
        );
        self.steps = steps.first().copied().unwrap_or(0);
        (self.first, self.second) = (first, second);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nesterov_matches_the_hand_computed_history() {
        let mut o = Sgd::new(0.5, 0.5, true);
        let mut p = [1.0f32];
        o.update(0, &mut p, &[1.0]).unwrap(); // b = 1, direction 1.5
        assert_eq!(p, [0.25]);
        o.update(0, &mut p, &[1.0]).unwrap(); // b = 1.5, direction 1.75
        assert_eq!(p, [-0.625]);
    }

    #[test]
    fn adamw_takes_a_first_step_of_size_lr_and_decays_weights() {
        let mut o = AdamW::new(0.1, 0.5);
        let mut p = [1.0f32, 1.0];
        o.begin_step();
        o.update(0, &mut p, &[3.0, -0.01]).unwrap();
        assert!(
            (p[0] - (0.95 - 0.1)).abs() < 1e-5 && (p[1] - (0.95 + 0.1)).abs() < 1e-5,
            "{p:?}"
        );
    }

    #[test]
    fn state_survives_save_and_load_bit_for_bit() {
        let mut a = AdamW::new(0.1, 0.0);
        let (mut p, mut q) = ([1.0f32, 2.0], [1.0f32, 2.0]);
        for i in 0..5 {
            a.begin_step();
            a.update(3, &mut p, &[0.1 * i as f32, -0.3]).unwrap();
        }
        let mut dict = StateDict::new();
        a.save("inner", &mut dict).unwrap();
        let mut b = AdamW::new(0.1, 0.0);
        b.load("inner", &dict).unwrap();
        q.copy_from_slice(&p);
        for o in [&mut a, &mut b] {
            o.begin_step();
        }
        a.update(3, &mut p, &[0.7, 0.7]).unwrap();
        b.update(3, &mut q, &[0.7, 0.7]).unwrap();
        assert_eq!(p.map(f32::to_bits), q.map(f32::to_bits));
    }

    #[test]
    fn what_was_assigned_goes_on_bit_for_bit_and_keeps_nothing_of_its_own() {
        let trained = |mut o: Box<dyn Optimizer>, slots: &[usize]| {
            for &slot in slots {
                o.begin_step();
                o.update(slot, &mut [1.0, 2.0], &[0.3 * slot as f32, -0.1])
                    .unwrap();
            }
            o
        };
        let kinds: [fn(f32) -> Box<dyn Optimizer>; 2] = [
            |lr| Box::new(Sgd::new(lr, 0.9, lr < 0.2)),
            |lr| Box::new(AdamW::new(lr, lr / 10.0)),
        ];
        for make in kinds {
            let from = trained(make(0.1), &[1, 2, 1]);
            let mut to = trained(make(0.5), &[1, 3]);
            assert!(to.assign(&*from));
            let mut state = [StateDict::new(), StateDict::new()];
            let mut params = [[1.0f32, 2.0]; 2];
            for ((mut o, p), dict) in [from, to].into_iter().zip(&mut params).zip(&mut state) {
                o.begin_step();
                o.update(2, p, &[0.7, 0.2]).unwrap();
                o.save("o", dict).unwrap();
            }
            assert_eq!(params[0].map(f32::to_bits), params[1].map(f32::to_bits));
            let [a, b] = state.map(|dict| {
                let all = dict
                    .iter()
                    .map(|(name, tensor)| (name.to_owned(), tensor.data.to_vec()));
                all.collect::<Vec<_>>()
            });
            assert_eq!(a, b);
        }
        let mut sgd = trained(kinds[0](0.1), &[1]);
        assert!(!sgd.assign(&*kinds[1](0.1)));
    }

    #[test]
    fn a_gradient_of_another_size_is_refused() {
        let mut o = Sgd::new(1.0, 0.9, false);
        let mut p = [0.0f32; 2];
        assert!(o.update(0, &mut p, &[1.0]).is_err());
    }
}

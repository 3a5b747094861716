//! Which part of which gradient travels in which bucket, and the buckets as they fill.
//!
//! A backward pass makes the last parameter's gradient first, so the slots are dealt to buckets from the last to the
//! first, until the order in which they really come is learnt; buckets hold one dtype each, the first of a dtype is small
//! so that communication starts early. What does not fit into a bucket goes on in the next one: nothing is left out (L04).
//! Buckets are sent strictly in their order, which follows from the slots and what was learnt alone and is the same on all
//! replicas, whatever the order of the pushes.
//!
//! The order is learnt with the first step: each contributor sends the position of every slot among its pushes, the mean over
//! them is the same on all replicas, and the slots are dealt anew by it once the step has committed. From then on it is a part of the
//! state, so that one that heals deals as the others do.

use std::collections::BTreeMap;

use ftcore::{DType, Element, Error, ErrorKind, Result, Tensor, copy_bytes};
use half::{bf16, f16};
use replica::{ManagedWork, Participation, Replica, Spare};

use crate::under_way::UnderWay;

/// One gradient's place. The list of slots is the same on every replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// The element type: f64, f32, f16 or bf16.
    pub dtype: DType,
    /// The number of elements.
    pub count: usize,
}

impl Slot {
    /// A slot of f32.
    pub const fn f32(count: usize) -> Self {
        Self {
            dtype: DType::F32,
            count,
        }
    }
}

/// A run of elements of a slot and where they stand in a bucket. In elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    bucket: usize,
    at: usize,
    from: usize,
    len: usize,
}

/// How slots are dealt to buckets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BucketPlan {
    slots: Vec<Slot>,
    /// The sizes of the first bucket of a dtype and of the others, in elements.
    sizes: (usize, usize),
    /// The slots in the order in which their gradients come, once it is learnt.
    order: Option<Vec<usize>>,
    pieces: Vec<Vec<Piece>>,
    buckets: Vec<Slot>,
}

/// A bucket that is being dealt.
struct Open {
    bucket: usize,
    room: usize,
}

impl BucketPlan {
    /// `first` and `rest` are the sizes of the first bucket of a dtype and of the others, in elements, at least 1.
    pub(crate) fn new(slots: &[Slot], first: usize, rest: usize) -> Result<Self> {
        let is_gradient = |s: &&Slot| matches!(s.dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16);
        if let Some(other) = slots.iter().find(|s| !is_gradient(s)) {
            return Err(Error::invalid(format!(
                "gradients are f64, f32, f16 or bf16, not {}",
                other.dtype
            )));
        }
        let mut plan = Self {
            slots: slots.to_vec(),
            sizes: (first, rest),
            order: None,
            pieces: Vec::new(),
            buckets: Vec::new(),
        };
        plan.deal();
        Ok(plan)
    }

    /// Deals the slots to buckets.
    fn deal(&mut self) {
        let (first, rest) = self.sizes;
        let mut open: BTreeMap<DType, Open> = BTreeMap::new();
        let mut buckets: Vec<Slot> = Vec::new();
        // The turn in which a bucket got its last piece: it can be sent after that.
        let mut full_at: Vec<usize> = Vec::new();
        let mut pieces = vec![Vec::new(); self.slots.len()];
        let mut turn = 0;
        let order = self
            .order
            .clone()
            .unwrap_or_else(|| (0..self.slots.len()).rev().collect());
        for index in order {
            let (Some(slot), Some(own)) = (self.slots.get(index), pieces.get_mut(index)) else {
                continue;
            };
            let mut from = 0;
            while from < slot.count {
                let is_first = !open.contains_key(&slot.dtype);
                let now = open.entry(slot.dtype).or_insert(Open { bucket: 0, room: 0 });
                if now.room == 0 {
                    *now = Open {
                        bucket: buckets.len(),
                        room: if is_first { first } else { rest },
                    };
                    buckets.push(Slot {
                        dtype: slot.dtype,
                        count: 0,
                    });
                    full_at.push(0);
                }
                let len = now.room.min(slot.count - from);
                if let (Some(bucket), Some(at)) = (buckets.get_mut(now.bucket), full_at.get_mut(now.bucket)) {
                    own.push(Piece {
                        bucket: now.bucket,
                        at: bucket.count,
                        from,
                        len,
                    });
                    bucket.count += len;
                    *at = turn;
                }
                now.room -= len;
                from += len;
                turn += 1;
            }
        }
        let mut order: Vec<usize> = (0..buckets.len()).collect();
        order.sort_by_key(|&b| full_at.get(b).copied());
        let mut position = vec![0; buckets.len()];
        for (new, &old) in order.iter().enumerate() {
            if let Some(p) = position.get_mut(old) {
                *p = new;
            }
        }
        for piece in pieces.iter_mut().flatten() {
            piece.bucket = position.get(piece.bucket).copied().unwrap_or(0);
        }
        self.pieces = pieces;
        self.buckets = order.iter().filter_map(|&b| buckets.get(b).copied()).collect();
    }

    /// The order that was learnt.
    pub(crate) fn order(&self) -> Option<&[usize]> {
        self.order.as_deref()
    }

    /// True while there is an order to learn: a single bucket leaves at the end in any.
    pub(crate) fn is_new(&self) -> bool {
        self.order.is_none() && self.buckets.len() > 1
    }

    /// Deals by an order that other replicas, or this one before, have learnt; `None`: by that of the slots.
    ///
    /// Errors: `InvalidArgument` if it is not one of these slots.
    pub(crate) fn follow(&mut self, order: Option<Vec<usize>>) -> Result<()> {
        if let Some(order) = &order {
            let mut sorted = order.clone();
            sorted.sort_unstable();
            if !sorted.iter().copied().eq(0..self.slots.len()) {
                return Err(Error::invalid(format!(
                    "the order of the gradients is not one of {} slots: {order:?}",
                    self.slots.len()
                )));
            }
        }
        if order != self.order {
            self.order = order;
            self.deal();
        }
        Ok(())
    }

    /// Takes the mean of the positions that [`Sink::finish`] sent out of the reduced buckets, if it is there.
    pub(crate) fn positions(&self, reduced: &mut Vec<Tensor>) -> Option<Tensor> {
        (reduced.len() > self.buckets.len())
            .then(|| reduced.pop())
            .flatten()
    }

    /// Deals by the mean of the [positions](Self::positions). A quantised group rounds it, to the same values on all replicas.
    pub(crate) fn learn(&mut self, positions: &Tensor) -> Result<()> {
        let means = positions.as_slice::<f32>()?;
        let mut order: Vec<usize> = (0..self.slots.len()).rev().collect();
        // Stable: what is equal stays in the order in which it was dealt.
        let mean = |slot: &usize| means.get(*slot).copied().unwrap_or(f32::INFINITY);
        order.sort_by(|a, b| mean(a).total_cmp(&mean(b)));
        self.follow(Some(order))
    }

    /// The number of slots.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Sends every bucket as zeros: what a replica sends that does not contribute. `learns`: in a step that learns the order.
    pub(crate) fn send_zeros(
        &self,
        replica: &mut dyn Replica,
        learns: bool,
        under_way: &UnderWay,
    ) -> Vec<ManagedWork> {
        let positions = Slot::f32(self.slots.len());
        let all = self.buckets.iter().chain(Some(&positions).filter(|_| learns));
        all.map(|b| under_way.send(replica, Tensor::zeros(b.dtype, b.count)))
            .collect()
    }

    /// The slots' tensors out of the buckets'. `in_place`: a slot that lies in one bucket stays there; what was cut over several is copied, and
    /// otherwise all are. Copies go into `earlier`, what an earlier step's [`Lent::whole_again`] left, where there is any.
    pub(crate) fn unpack(
        &self,
        buckets: Vec<Tensor>,
        earlier: Vec<Tensor>,
        in_place: bool,
    ) -> Result<(Vec<Tensor>, Lent)> {
        let short = || Error::new(ErrorKind::Internal, "a bucket came back shorter than it was sent");
        let stays = |slot: usize| in_place && self.pieces.get(slot).is_some_and(|pieces| pieces.len() == 1);
        let copied = self.slots.iter().enumerate().map(|(n, slot)| Slot {
            count: if stays(n) { 0 } else { slot.count },
            ..*slot
        });
        let mut tensors = memory(&copied.collect::<Vec<_>>(), earlier);
        let mut of_bucket = vec![Vec::new(); self.buckets.len()];
        for (slot, pieces) in self.pieces.iter().enumerate() {
            for p in pieces {
                of_bucket.get_mut(p.bucket).ok_or_else(short)?.push((slot, *p));
            }
        }
        if buckets.len() < of_bucket.len() {
            return Err(short());
        }
        let mut lent = Vec::with_capacity(buckets.len());
        for (bucket, mut pieces) in buckets.into_iter().zip(of_bucket) {
            pieces.sort_unstable_by_key(|(_, p)| p.at);
            let mut parts = Vec::with_capacity(pieces.len());
            let mut rest = bucket;
            for (slot, p) in pieces {
                let (part, behind) = rest.split_at(p.len).map_err(|_| short())?;
                rest = behind;
                let tensor = tensors.get_mut(slot).ok_or_else(short)?;
                if stays(slot) {
                    *tensor = part;
                    parts.push(Place::Slot(slot));
                } else {
                    let size = tensor.dtype().size();
                    let to = tensor.bytes_mut().get_mut(p.from * size..(p.from + p.len) * size);
                    copy_bytes(to.ok_or_else(short)?, part.bytes());
                    parts.push(Place::Here(part));
                }
            }
            parts.push(Place::Here(rest));
            lent.push(parts);
        }
        Ok((tensors, Lent(lent)))
    }
}

/// Where a part of a bucket is.
enum Place {
    /// It is that slot's tensor.
    Slot(usize),
    Here(Tensor),
}

/// The buckets of which slots have parts, in their order.
pub(crate) struct Lent(Vec<Vec<Place>>);

impl Lent {
    /// The buckets out of the slots' tensors, of which the copies are left.
    pub(crate) fn whole_again(self, tensors: &mut [Tensor]) -> Vec<Tensor> {
        let mut part = |place: Place| match place {
            Place::Here(part) => Some(part),
            Place::Slot(slot) => {
                let tensor = tensors.get_mut(slot)?;
                let nothing = Tensor::zeros(tensor.dtype(), 0);
                Some(std::mem::replace(tensor, nothing))
            }
        };
        // Memory that is not whole any more is not kept.
        let buckets = self.0.into_iter().map(|places| {
            let mut parts = places.into_iter().map(&mut part);
            let first = parts.next()??;
            parts.try_fold(first, |whole, next| whole.join(next?).ok())
        });
        buckets.flatten().collect()
    }
}

/// A tensor for each of `places`: those of an earlier step with what they hold, or new ones. New pages cost more than a copy into old ones.
fn memory(places: &[Slot], earlier: Vec<Tensor>) -> Vec<Tensor> {
    let fit = |t: &Tensor, place: &Slot| (t.dtype(), t.count()) == (place.dtype, place.count);
    if earlier.len() == places.len() && earlier.iter().zip(places).all(|(t, place)| fit(t, place)) {
        return earlier;
    }
    places.iter().map(|p| Tensor::zeros(p.dtype, p.count)).collect()
}

/// Sends a copy of `bucket`, which is kept: the attempt may be lost.
pub(crate) fn average(
    spare: &mut Spare,
    replica: &mut dyn Replica,
    under_way: &UnderWay,
    bucket: &Tensor,
) -> ManagedWork {
    let mut copy = spare.take(replica, bucket.dtype(), bucket.count());
    copy_bytes(copy.bytes_mut(), bucket.bytes());
    under_way.send(replica, copy)
}

/// A sum over micro-batches, in a type that loses little.
enum Sum {
    Single(Vec<f32>),
    Double(Vec<f64>),
}

/// What is known of the attempt while gradients are computed.
enum Part {
    /// The quorum stands.
    Stands(Participation),
    /// It was begun, and was not asked for yet.
    Begun,
    /// It did not come about; what was computed waits for the next.
    Failed(Error),
}

/// Takes gradients in as the backward pass makes them, and sends every bucket as soon as it is full.
///
/// Slots that are never pushed (parameters that were not used) count as zero gradients.
pub struct Sink<'a> {
    replica: &'a mut dyn Replica,
    plan: &'a BucketPlan,
    spare: &'a mut Spare,
    under_way: &'a UnderWay,
    part: Part,
    micro_batches: u32,
    micro_batch: u32,
    /// The slots as they were pushed in the last micro-batch, if the order is to be learnt.
    order: Option<Vec<usize>>,
    /// Per slot, while micro-batches add up.
    sums: Vec<Option<Sum>>,
    /// Per slot: pushed in this micro-batch.
    pushed: Vec<bool>,
    buckets: Vec<Tensor>,
    /// Per slot: its values are in the buckets.
    placed: Vec<bool>,
    /// Per bucket: elements that have not arrived.
    missing: Vec<usize>,
    works: Vec<ManagedWork>,
}

impl<'a> Sink<'a> {
    pub(crate) fn new(
        replica: &'a mut dyn Replica,
        plan: &'a BucketPlan,
        (spare, under_way): (&'a mut Spare, &'a UnderWay),
        participation: Option<Participation>,
        micro_batches: u32,
        earlier: Vec<Tensor>,
        learns: bool,
    ) -> Self {
        Self {
            replica,
            plan,
            spare,
            under_way,
            order: learns.then(Vec::new),
            part: participation.map_or(Part::Begun, Part::Stands),
            micro_batches: micro_batches.max(1),
            micro_batch: 0,
            sums: plan.slots.iter().map(|_| None).collect(),
            pushed: vec![false; plan.slots.len()],
            buckets: memory(&plan.buckets, earlier),
            placed: vec![false; plan.slots.len()],
            missing: plan.buckets.iter().map(|b| b.count).collect(),
            works: Vec::with_capacity(plan.buckets.len()),
        }
    }

    /// The part that this replica has in the attempt. If the quorum is still looked for, this waits for it
    /// ([`DdpConfig::overlap_quorum`](crate::DdpConfig::overlap_quorum)); a replica that turns out to be behind does not contribute.
    ///
    /// Errors: those of the quorum, which the step ends with.
    pub fn participation(&mut self) -> Result<&Participation> {
        if matches!(self.part, Part::Begun) {
            self.part = match self.replica.await_quorum() {
                Ok(participation) => Part::Stands(participation),
                Err(error) => Part::Failed(error),
            };
        }
        match &self.part {
            Part::Stands(participation) => Ok(participation),
            Part::Failed(error) => Err(error.clone()),
            Part::Begun => Err(Error::new(
                ErrorKind::Internal,
                "a quorum is neither there nor not",
            )),
        }
    }

    /// Whether what is full may go. What does not count is not sent.
    fn counts(&mut self) -> bool {
        self.participation().is_ok_and(|p| p.contributes)
    }

    /// The gradient of `slot` in this micro-batch.
    ///
    /// Errors: `InvalidArgument` for a slot that does not exist or was pushed in this micro-batch already, and for another
    /// dtype or count than the slot's. Nothing was taken in then.
    pub fn push<T: Element>(&mut self, slot: usize, values: &[T]) -> Result<()> {
        let Some((place, pushed)) = self.plan.slots.get(slot).zip(self.pushed.get_mut(slot)) else {
            return Err(Error::invalid(format!(
                "there is no gradient slot {slot}; there are {}",
                self.plan.slots.len()
            )));
        };
        if (T::DTYPE, values.len()) != (place.dtype, place.count) {
            return Err(Error::invalid(format!(
                "gradient slot {slot} holds {} elements of {}, not {} of {}",
                place.count,
                place.dtype,
                values.len(),
                T::DTYPE
            )));
        }
        if std::mem::replace(pushed, true) {
            return Err(Error::invalid(format!(
                "gradient slot {slot} was pushed twice in micro-batch {}",
                self.micro_batch
            )));
        }
        if self.micro_batches == 1 {
            self.place(slot, values)?;
        } else {
            self.add(slot, values)?;
            if self.micro_batch + 1 == self.micro_batches {
                self.place_mean(slot)?;
            }
        }
        if self.micro_batch + 1 == self.micro_batches
            && let Some(order) = &mut self.order
        {
            order.push(slot);
        }
        self.send_full();
        Ok(())
    }

    /// Begins the next micro-batch.
    pub(crate) fn next_micro_batch(&mut self) {
        self.micro_batch += 1;
        self.pushed.fill(false);
    }

    fn add<T: Element>(&mut self, slot: usize, values: &[T]) -> Result<()> {
        let values = Tensor::from_slice(values);
        let Some(sum) = self.sums.get_mut(slot) else {
            return Ok(());
        };
        let count = values.count();
        let sum = sum.get_or_insert_with(|| match values.dtype() {
            DType::F64 => Sum::Double(vec![0.0; count]),
            _ => Sum::Single(vec![0.0; count]),
        });
        match (sum, values.dtype()) {
            (Sum::Double(s), _) => s
                .iter_mut()
                .zip(values.as_slice::<f64>()?)
                .for_each(|(s, v)| *s += v),
            (Sum::Single(s), DType::F16) => {
                s.iter_mut()
                    .zip(values.as_slice::<f16>()?)
                    .for_each(|(s, v)| *s += v.to_f32());
            }
            (Sum::Single(s), DType::BF16) => {
                s.iter_mut()
                    .zip(values.as_slice::<bf16>()?)
                    .for_each(|(s, v)| *s += v.to_f32());
            }
            (Sum::Single(s), _) => s
                .iter_mut()
                .zip(values.as_slice::<f32>()?)
                .for_each(|(s, v)| *s += v),
        }
        Ok(())
    }

    /// The mean over the micro-batches goes into the buckets. Rounds to nearest even in 16-bit slots.
    fn place_mean(&mut self, slot: usize) -> Result<()> {
        let Some(sum) = self.sums.get_mut(slot).and_then(Option::take) else {
            return Ok(());
        };
        let n = self.micro_batches;
        let dtype = self.plan.slots.get(slot).map(|s| s.dtype);
        match (sum, dtype) {
            (Sum::Double(s), _) => {
                self.place(slot, &s.iter().map(|v| v / f64::from(n)).collect::<Vec<f64>>())
            }
            (Sum::Single(s), Some(DType::F16)) => {
                let mean: Vec<f16> = s.iter().map(|v| f16::from_f32(v / n as f32)).collect();
                self.place(slot, &mean)
            }
            (Sum::Single(s), Some(DType::BF16)) => {
                let mean: Vec<bf16> = s.iter().map(|v| bf16::from_f32(v / n as f32)).collect();
                self.place(slot, &mean)
            }
            (Sum::Single(s), _) => self.place(slot, &s.iter().map(|v| v / n as f32).collect::<Vec<f32>>()),
        }
    }

    fn place<T: Element>(&mut self, slot: usize, values: &[T]) -> Result<()> {
        if let Some(placed) = self.placed.get_mut(slot) {
            *placed = true;
        }
        for p in self.plan.pieces.get(slot).into_iter().flatten() {
            let (Some(bucket), Some(missing)) =
                (self.buckets.get_mut(p.bucket), self.missing.get_mut(p.bucket))
            else {
                continue;
            };
            let to = bucket.as_mut_slice::<T>()?.get_mut(p.at..p.at + p.len);
            if let (Some(to), Some(from)) = (to, values.get(p.from..p.from + p.len)) {
                to.copy_from_slice(from);
                *missing -= p.len;
            }
        }
        Ok(())
    }

    /// What was not pushed is zero, whatever an earlier step left there.
    fn place_zeros(&mut self) {
        let slots = self.plan.slots.iter().zip(&self.plan.pieces);
        for ((slot, pieces), _) in slots.zip(&self.placed).filter(|(_, placed)| !**placed) {
            let size = slot.dtype.size();
            for p in pieces {
                let bucket = self.buckets.get_mut(p.bucket);
                let bytes = bucket.and_then(|b| b.bytes_mut().get_mut(p.at * size..(p.at + p.len) * size));
                if let Some(bytes) = bytes {
                    bytes.fill(0);
                }
            }
        }
    }

    /// Sends what is full, up to the first bucket that is not.
    fn send_full(&mut self) {
        while self.missing.get(self.works.len()) == Some(&0) && self.counts() {
            self.send_next();
        }
    }

    fn send_next(&mut self) {
        if let Some(bucket) = self.buckets.get(self.works.len()) {
            // The original stays here, to be sent again if the step fails.
            let work = average(self.spare, self.replica, self.under_way, bucket);
            self.works.push(work);
        }
    }

    /// Of each slot, if the order is to be learnt: how many were pushed before it. Those that were not come last, in the order of the slots.
    fn positions(&mut self) -> Option<Vec<f32>> {
        let mut order = self.order.take()?;
        let pushed = &self.pushed;
        order.extend(
            (0..pushed.len())
                .rev()
                .filter(|&slot| pushed.get(slot) == Some(&false)),
        );
        let mut positions = vec![0.0; order.len()];
        for (at, slot) in order.into_iter().enumerate() {
            if let Some(position) = positions.get_mut(slot) {
                *position = at as f32;
            }
        }
        Some(positions)
    }

    /// Sends the rest, parameters that were not used as zeros; gives back what is under way, if it counts, and the buckets themselves.
    pub(crate) fn finish(mut self) -> Result<(Option<Vec<ManagedWork>>, Vec<Tensor>)> {
        for slot in 0..self.sums.len() {
            // Pushed in an earlier micro-batch, but not in the last one.
            self.place_mean(slot)?;
        }
        self.place_zeros();
        if let Some(positions) = self.positions() {
            self.buckets.push(Tensor::from_vec(positions));
        }
        if !self.counts() {
            return Ok((None, self.buckets));
        }
        while self.works.len() < self.buckets.len() {
            self.send_next();
        }
        Ok((Some(self.works), self.buckets))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_stay_in_their_buckets_which_are_whole_again_with_their_memory() {
        for (first, rest) in [(1, 1), (2, 5), (6, 14), (100, 100)] {
            let slots = [6usize, 0, 6, 1, 7].map(Slot::f32);
            let plan = BucketPlan::new(&slots, first, rest).unwrap();
            let bucket = |(n, b): (usize, &Slot)| {
                let values = (0..b.count).map(|i| (100 * n + i) as f32);
                Tensor::from_vec(values.collect())
            };
            let mut buckets: Vec<Tensor> = plan.buckets.iter().enumerate().map(bucket).collect();
            let at: Vec<*const u8> = buckets.iter().map(Tensor::as_ptr).collect();
            let mut earlier = Vec::new();
            let mut found: Vec<Vec<Vec<f32>>> = Vec::new();
            for in_place in [false, true, true] {
                let (mut tensors, lent) = plan.unpack(buckets, earlier, in_place).unwrap();
                let values = tensors.iter().map(|t| t.as_slice::<f32>().unwrap().to_vec());
                found.push(values.collect());
                for (tensor, pieces) in tensors.iter().zip(&plan.pieces) {
                    let own = pieces.first().map(|p| at[p.bucket].wrapping_add(p.at * 4));
                    let stays = pieces.len() == 1 && in_place;
                    assert_eq!(own == Some(tensor.as_ptr()), stays, "{pieces:?}");
                }
                buckets = lent.whole_again(&mut tensors);
                let same = buckets.iter().zip(&plan.buckets).zip(&at);
                assert!(
                    same.clone()
                        .all(|((b, slot), at)| (b.count(), b.as_ptr()) == (slot.count, *at))
                );
                assert_eq!(same.count(), plan.buckets.len());
                earlier = tensors;
            }
            assert_eq!(found[0], found[1]);
            assert_eq!(found[1], found[2]);
            assert_eq!(found[0].concat().len(), 20);
            buckets.pop();
            assert!(plan.unpack(buckets, Vec::new(), true).is_err());
        }
    }

    #[test]
    fn every_element_is_in_exactly_one_bucket_from_the_last_slot_to_the_first() {
        for (first, rest) in [(1, 1), (2, 5), (3, 4), (100, 100)] {
            let slots = [6usize, 0, 6, 1, 7].map(Slot::f32);
            let plan = BucketPlan::new(&slots, first, rest).unwrap();
            let total: usize = plan.buckets.iter().map(|b| b.count).sum();
            assert_eq!(total, 20);
            for (slot, pieces) in slots.iter().zip(&plan.pieces) {
                let mut next = 0;
                for p in pieces {
                    assert_eq!(p.from, next);
                    next += p.len;
                    assert!(p.at + p.len <= plan.buckets[p.bucket].count);
                }
                assert_eq!(next, slot.count);
            }
            assert_eq!(plan.pieces[4][0].bucket, 0, "the last gradient is made first");
            assert!(plan.buckets[0].count <= first);
            assert!(plan.buckets.iter().skip(1).all(|b| b.count <= rest));
        }
    }

    #[test]
    fn dtypes_have_buckets_of_their_own_and_a_full_one_waits_for_no_open_one() {
        let slots = [
            Slot::f32(4),
            Slot {
                dtype: DType::BF16,
                count: 2,
            },
            Slot::f32(1),
        ];
        let plan = BucketPlan::new(&slots, 2, 8).unwrap();
        let order: Vec<(DType, usize)> = plan.buckets.iter().map(|b| (b.dtype, b.count)).collect();
        // The first f32 bucket is opened first, but gets its last element after the bf16 one is full.
        assert_eq!(order, [(DType::BF16, 2), (DType::F32, 2), (DType::F32, 3)]);
        let e = BucketPlan::new(
            &[Slot {
                dtype: DType::I32,
                count: 1,
            }],
            1,
            1,
        );
        assert!(e.unwrap_err().to_string().contains("not i32"));
    }
}

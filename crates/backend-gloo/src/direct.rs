//! The short way for what is called most: an all-reduce of one tensor, or a barrier, between ranks that share memory, run by
//! the caller. The same frames in the same order as `execution` would write, so a rank that takes the long way notices nothing.
//!
//! No schedule is made and nothing is allocated. Each frame is shown on a line of its own besides, where a rank that goes the short way, too, finds
//! it (`transport/shm/ring`). Others are woken as late as that can be: before this rank waits, and at its end. Anything out of the ordinary (premul, a rank that does not contribute, larger
//! worlds with more than fits at once) goes the long way.

use std::time::Instant;

use ftcore::{
    Collective, DType, Error, ErrorKind, Fingerprint, ReduceOp, Result, Tensor, copy_bytes, time_left,
};

use crate::execution::{may_swap_in_place, take_offer};
use crate::executor::{Executor, Holder, timed_out};
use crate::expected::{Expected, check_header, mismatch};
use crate::kernels;
use crate::port::{Memory, Port, Wire, decoded};
use crate::queue::Shared;
use crate::schedule::{Algorithm, all_reduce_algorithm, barrier_reach, barrier_rounds, down, up};
use crate::transfer::CHUNK;
use crate::transport::shm::{CAPACITY, SHOWN_BYTES, Shown};
use crate::waiter::Waiter;
use crate::wire::DataHeader;

/// Two ranks swap up to so many bytes in one frame each, beyond that chunk by chunk.
const SHORT: usize = 4096;
/// A rank that spins looks for a frame's line so often until it looks whether the frame has come without: the line of the positions stays with its
/// writer until then.
const LOOKS: u32 = 32;

/// Runs `op` if it can go the short way: `None` if it cannot, else the contributors.
pub(crate) fn run(
    holder: &mut Holder<'_>,
    shared: &Shared,
    op: &mut Collective,
    contribute: bool,
    seq: u64,
    deadline: Instant,
) -> Option<Result<u32>> {
    if !shared.place.one_host || !contribute {
        return None;
    }
    let fingerprint = op.fingerprint();
    let executor = match holder.executor() {
        Ok(executor) => executor,
        Err(error) => return Some(Err(error)),
    };
    // The long way finds out whether all that it needs is here.
    if shared.report().is_some() {
        return None;
    }
    let mut call = Call {
        executor,
        shared,
        waiter: Waiter::default(),
        seq,
        deadline,
        fingerprint,
        began: None,
    };
    let done = match op {
        Collective::Barrier => call.barrier().map(|()| 0),
        Collective::AllReduce { tensors, op } if !matches!(op, ReduceOp::PremulSum(_)) => {
            let [tensor] = tensors.as_mut_slice() else {
                return None;
            };
            let algorithm = all_reduce_algorithm(shared.place.world, tensor.byte_len(), true);
            match algorithm {
                // The other rank may want to read it in place, too.
                Algorithm::Exchange if may_swap_in_place(tensor.bytes()) => return None,
                Algorithm::Exchange => {
                    let peer = 1 - shared.place.rank.min(1);
                    let done = match tensor.byte_len() <= SHORT && call.fits(tensor.byte_len()) {
                        true => call.swap(tensor, *op, peer),
                        false => call.exchange(tensor, *op, peer),
                    };
                    done.map_err(|e| blame(call.executor, peer, e))
                }
                Algorithm::Direct if call.fits(tensor.byte_len()) => call.all_to_all(tensor, *op),
                _ => return None,
            }
        }
        _ => return None,
    };
    call.ring();
    call.waiter.moved(call.executor, shared);
    Some(done)
}

/// One operation on its short way.
struct Call<'a> {
    executor: &'a mut Executor,
    shared: &'a Shared,
    waiter: Waiter,
    seq: u64,
    deadline: Instant,
    fingerprint: Fingerprint,
    /// When the first wait began, for the text of a time-out.
    began: Option<Instant>,
}

fn port_of(executor: &mut Executor, rank: u32) -> Result<&mut Port> {
    let port = executor.ports.get_mut(rank as usize).and_then(Option::as_mut);
    port.ok_or_else(|| {
        Error::new(
            ErrorKind::Internal,
            format!("there is no connection to rank {rank}"),
        )
    })
}

/// Names the rank whose ring an error came out of, if it does not name one.
fn blame(executor: &mut Executor, rank: u32, error: Error) -> Error {
    match executor.ports.get(rank as usize) {
        Some(Some(port)) if error.kind() == ErrorKind::Protocol && error.context().peer.is_none() => {
            port.blame(error)
        }
        _ => error,
    }
}

/// The rings of a port; on the short way every port has them.
fn rings(port: &mut Port) -> Result<&mut Memory> {
    match &mut port.wire {
        Wire::Memory(memory) => Ok(memory),
        Wire::Socket(_) => Err(Error::new(
            ErrorKind::Internal,
            "the short way leads over a socket",
        )),
    }
}

/// The contributors that a frame of the short way speaks for.
fn speaks_for(algorithm: Algorithm) -> u32 {
    u32::from(algorithm != Algorithm::Dissemination)
}

impl Call<'_> {
    fn header(&self, round: u32, algorithm: Algorithm, length: usize) -> [u8; DataHeader::BYTES] {
        DataHeader {
            epoch: self.shared.place.epoch,
            seq: self.seq,
            round,
            algorithm: algorithm as u32,
            contributors: speaks_for(algorithm),
            length: length as u64,
            fingerprint: self.fingerprint,
            lent: false,
        }
        .encode()
    }

    /// Wakes those that wait for what this rank has written or taken.
    fn ring(&mut self) {
        self.executor.ports.iter_mut().flatten().for_each(Port::ring);
    }

    /// Nothing moved: waits a little. `from` is whom this rank waits for.
    fn wait(&mut self, from: u32, sends: bool) -> Result<()> {
        self.ring();
        let known = self.executor.ports.get(from as usize).and_then(Option::as_ref);
        let closed = known.is_some_and(Port::read_closed);
        let Some(began) = self.began else {
            self.began = Some(Instant::now());
            return Ok(());
        };
        if closed {
            self.executor.blocked(self.shared, from)?;
        }
        self.compare_others()?;
        let deadline = self.deadline;
        self.waiter.wait(self.executor, self.shared, |_| deadline)?;
        if self.waiter.asks_the_clock() && time_left(deadline).is_zero() {
            let elapsed = began.elapsed().as_secs_f64();
            let (senders, takers) = if sends {
                (vec![], vec![from])
            } else {
                (vec![from], vec![])
            };
            let world = self.shared.place.world;
            let text = timed_out(elapsed, "after 0 of 1 rounds", &senders, &takers, world);
            return Err(Error::timeout(text).with_epoch(self.shared.place.epoch));
        }
        Ok(())
    }

    /// After a sleep: a rank from which this one expects nothing now may have called something else.
    fn compare_others(&mut self) -> Result<()> {
        if !self.waiter.is_slow() {
            return Ok(());
        }
        for port in self.executor.ports.iter_mut().flatten() {
            let header = match port.header {
                Some(header) => header,
                // What comes next there is not a header.
                None if port.in_payload => continue,
                None => {
                    let memory = rings(port)?;
                    let found = memory.reader.available(DataHeader::BYTES);
                    let bytes = memory.reader.peek();
                    found.map_err(|e| port.blame(e))?;
                    let Some(bytes) = bytes else { continue };
                    decoded(&bytes).map_err(|e| port.blame(e))?
                }
            };
            if header.seq == self.seq && header.fingerprint != self.fingerprint {
                return Err(mismatch(port, &header, self.fingerprint));
            }
        }
        Ok(())
    }

    /// Waits for a frame of `rank`, which is to have the same header as this rank's own, and checks that: the number of contributors it speaks for, and
    /// the payload if that is at hand already.
    fn expect(
        &mut self,
        rank: u32,
        (round, algorithm, length): (u32, Algorithm, usize),
        own: &[u8; DataHeader::BYTES],
    ) -> Result<(u32, Option<Shown>)> {
        let digest = DataHeader::digest(own);
        let spins = self.executor.spin_budget.spins();
        let mut looks = 0_u32;
        loop {
            let port = port_of(self.executor, rank)?;
            let mut is_known = true;
            if port.header.is_none() && !port.in_payload {
                let reader = &mut rings(port)?.reader;
                is_known = !reader.data(0, 1).is_empty();
                if let Some(payload) = reader.shown(digest, DataHeader::BYTES + length) {
                    reader.take(DataHeader::BYTES);
                    port.in_payload = length > 0;
                    self.waiter.moved(self.executor, self.shared);
                    let payload = Some(payload).filter(|_| length <= SHOWN_BYTES);
                    return Ok((speaks_for(algorithm), payload));
                }
            }
            looks = looks.wrapping_add(1);
            // Before a sleep everything is looked at, and before a rank that has gone is given up: its last frame may have come the long way.
            let shown_only = !is_known && spins && !self.waiter.is_slow() && !looks.is_multiple_of(LOOKS);
            if shown_only && !port_of(self.executor, rank)?.read_closed() {
                self.wait(rank, false)?;
                continue;
            }
            let port = port_of(self.executor, rank)?;
            port.fill().map_err(|e| port.blame(e))?;
            let Some(header) = port.header.take() else {
                self.wait(rank, false)?;
                continue;
            };
            let expected = Expected {
                epoch: self.shared.place.epoch,
                seq: self.seq,
                round: round as usize,
                algorithm,
                fingerprint: self.fingerprint,
                length: length as u64,
            };
            if header.lent && algorithm == Algorithm::Exchange {
                // It would have read this rank's memory in place; what it swaps follows.
                check_header(
                    &header,
                    &Expected {
                        length: 0,
                        ..expected
                    },
                    port,
                )?;
                take_offer(port);
                continue;
            }
            check_header(&header, &expected, port)?;
            if header.lent {
                return Err(port.error(ErrorKind::Protocol, "lends memory where it has to send it"));
            }
            if header.contributors > self.shared.place.world {
                let text = format!("claims {} contributors", header.contributors);
                return Err(port.error(ErrorKind::Protocol, text));
            }
            port.in_payload = length > 0;
            self.waiter.moved(self.executor, self.shared);
            return Ok((header.contributors, None));
        }
    }

    /// Waits until a header fits into the ring to `rank`, and puts it there, not yet shown.
    fn put_header(&mut self, rank: u32, header: &[u8; DataHeader::BYTES]) -> Result<()> {
        loop {
            let port = port_of(self.executor, rank)?;
            let memory = rings(port)?;
            let room = memory.writer.room(DataHeader::BYTES);
            if room.map_err(|e| port.blame(e))? >= DataHeader::BYTES {
                rings(port)?.writer.put(header);
                return Ok(());
            }
            self.wait(rank, true)?;
        }
    }

    /// Sends a frame, whose payload [fits](Self::fits).
    fn send(&mut self, rank: u32, header: &[u8; DataHeader::BYTES], payload: &[u8]) -> Result<()> {
        let from = rings(port_of(self.executor, rank)?)?.writer.position();
        self.put_header(rank, header)?;
        let memory = rings(port_of(self.executor, rank)?)?;
        memory.writer.put(payload);
        memory.writer.pad();
        memory.publish();
        memory.writer.show(from, DataHeader::digest(header), payload);
        memory.count_sent(payload.len());
        Ok(())
    }

    /// Every rank waits for every other, as `schedule::barrier`.
    fn barrier(&mut self) -> Result<()> {
        let (rank, world) = (self.shared.place.rank, self.shared.place.world);
        for round in 0..barrier_rounds(world) {
            let header = self.header(round, Algorithm::Dissemination, 0);
            for k in barrier_reach(round, world) {
                self.send(up(rank, k, world), &header, &[])?;
            }
            for k in barrier_reach(round, world) {
                let from = down(rank, k, world);
                self.expect(from, (round, Algorithm::Dissemination, 0), &header)?;
                let memory = rings(port_of(self.executor, from)?)?;
                memory.release();
                memory.count_received(0);
            }
        }
        Ok(())
    }

    /// Two ranks, a short tensor: a frame each.
    fn swap(&mut self, tensor: &mut Tensor, op: ReduceOp, peer: u32) -> Result<u32> {
        let dtype = tensor.dtype();
        let data = tensor.bytes_mut();
        let header = self.header(0, Algorithm::Exchange, data.len());
        self.send(peer, &header, data)?;
        let (theirs, payload) = self.expect(peer, (0, Algorithm::Exchange, data.len()), &header)?;
        self.take(peer, data, payload, dtype, Some(op))?;
        if op == ReduceOp::Avg {
            // This rank is counted too.
            kernels::divide(dtype, data, theirs + 1)?;
        }
        Ok(theirs + 1)
    }

    /// Two ranks, any length: chunk by chunk out of the tensor and back into it.
    fn exchange(&mut self, tensor: &mut Tensor, op: ReduceOp, peer: u32) -> Result<u32> {
        let (dtype, element) = (tensor.dtype(), tensor.dtype().size());
        let data = tensor.bytes_mut();
        let total = data.len();
        let header = self.header(0, Algorithm::Exchange, total);
        self.put_header(peer, &header)?;
        let (mut sent, mut got) = (0, 0);
        let mut theirs = None;
        let mut shown = false;
        loop {
            let port = port_of(self.executor, peer)?;
            let memory = rings(port)?;
            let mut moved = !shown;
            if sent < total || !shown {
                let want = CHUNK.min(total - sent);
                let room = memory.writer.room(want)?.min(want);
                if let Some(chunk) = data.get(sent..sent + room) {
                    memory.writer.put(chunk);
                    sent += room;
                    moved |= room > 0;
                }
                if moved {
                    if sent == total {
                        memory.writer.pad();
                        memory.count_sent(total);
                    }
                    memory.publish();
                    memory.ring();
                    shown = true;
                }
            }
            let there = memory.reader.available(DataHeader::BYTES)? >= DataHeader::BYTES;
            if theirs.is_none() && (there || port.header.is_some()) {
                let (counted, _) = self.expect(peer, (0, Algorithm::Exchange, total), &header)?;
                theirs = Some(counted);
                moved = true;
            }
            let memory = rings(port_of(self.executor, peer)?)?;
            if let Some(theirs) = theirs {
                let most = CHUNK.min(sent - got);
                let have = memory.reader.available(most)?.min(most);
                let chunk = memory.reader.data(0, have - have % element);
                let len = chunk.len();
                if let Some(into) = data.get_mut(got..got + len).filter(|i| !i.is_empty()) {
                    kernels::reduce(dtype, op, into, chunk)?;
                    if op == ReduceOp::Avg {
                        // This rank is counted too.
                        kernels::divide(dtype, into, theirs + 1)?;
                    }
                    got += len;
                    memory.reader.take(len);
                    moved = true;
                }
                if got == total {
                    memory.reader.pad();
                    memory.count_received(total);
                }
                if moved {
                    memory.release();
                    memory.ring();
                }
                if got == total {
                    port_of(self.executor, peer)?.in_payload = false;
                    return Ok(theirs + 1);
                }
            }
            if moved {
                self.waiter.moved(self.executor, self.shared);
            } else {
                self.wait(peer, theirs.is_some() && sent < total)?;
            }
        }
    }

    /// True if a frame of that length fits into every ring right now.
    fn fits(&mut self, bytes: usize) -> bool {
        let frame = DataHeader::BYTES + bytes;
        frame <= CAPACITY
            && self
                .executor
                .ports
                .iter_mut()
                .flatten()
                .all(|port| match &mut port.wire {
                    Wire::Memory(memory) => memory.writer.room(frame).is_ok_and(|room| room >= frame),
                    Wire::Socket(_) => false,
                })
    }

    /// Several ranks, short: every rank's vector to all ranks, reduced in rank order, as `schedule::linear`.
    fn all_to_all(&mut self, tensor: &mut Tensor, op: ReduceOp) -> Result<u32> {
        let (rank, world) = (self.shared.place.rank, self.shared.place.world);
        let dtype = tensor.dtype();
        let data = tensor.bytes_mut();
        let header = self.header(0, Algorithm::Direct, data.len());
        for k in 1..world {
            self.send(up(rank, k, world), &header, data)?;
        }
        let mut own = std::mem::take(&mut self.executor.scratch);
        own.clear();
        if rank != 0 {
            own.extend_from_slice(data);
        }
        let mut contributors = 1;
        for from in 0..world {
            if from == rank {
                if rank != 0 {
                    kernels::reduce(dtype, op, data, &own)?;
                }
                continue;
            }
            let (counted, payload) = self.expect(from, (0, Algorithm::Direct, data.len()), &header)?;
            contributors += counted;
            let op = Some(op).filter(|_| from != 0);
            self.take(from, data, payload, dtype, op)
                .map_err(|e| blame(self.executor, from, e))?;
        }
        self.executor.scratch = own;
        if op == ReduceOp::Avg {
            kernels::divide(dtype, data, contributors)?;
        }
        Ok(contributors)
    }

    /// The payload of `from`, which is `shown` or in its ring: into `data`, or reduced into it.
    fn take(
        &mut self,
        from: u32,
        data: &mut [u8],
        shown: Option<Shown>,
        dtype: DType,
        op: Option<ReduceOp>,
    ) -> Result<()> {
        let mut done = 0;
        while done < data.len() {
            let memory = rings(port_of(self.executor, from)?)?;
            let left = data.len() - done;
            let chunk = match &shown {
                Some(shown) => shown.bytes(left),
                None => {
                    let have = memory.reader.available(left)?;
                    memory.reader.data(0, (have - have % dtype.size()).min(left))
                }
            };
            let len = chunk.len();
            let Some(into) = data.get_mut(done..done + len).filter(|i| !i.is_empty()) else {
                self.wait(from, false)?;
                continue;
            };
            match op {
                Some(op) => kernels::reduce(dtype, op, into, chunk)?,
                None => copy_bytes(into, chunk),
            }
            memory.reader.take(len);
            done += len;
        }
        let port = port_of(self.executor, from)?;
        port.in_payload = false;
        let memory = rings(port)?;
        memory.reader.pad();
        memory.release();
        memory.count_received(data.len());
        self.waiter.moved(self.executor, self.shared);
        Ok(())
    }
}

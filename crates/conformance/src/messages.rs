//! Point-to-point: matching by peer and tag, order, any source, batches, and independence of collectives.

use ftcore::{Collective, DType, ErrorKind, Feature, OpKind, ProcessGroup, ProcessGroupExt, Tensor};

use crate::case::{Case, Worlds};
use crate::failure::came_back;
use crate::oracle::{check_pattern, pattern};
use crate::probe::Probe;
use crate::sizes::{LARGE, SIZES};
use crate::{Failure, Needs, Outcome, Rank};

pub(crate) fn cases(worlds: Worlds) -> Vec<Case> {
    let of = |dtype| {
        [
            Needs::Op(OpKind::Send),
            Needs::Op(OpKind::Recv),
            Needs::Moves(dtype),
        ]
    };
    let with = |dtype, more| [&of(dtype)[..], &[more]].concat();
    let (both, ordered) = (of(DType::F32), of(DType::U32));
    let tags = with(DType::U32, Needs::Feature(Feature::Tags));
    let any = with(DType::U32, Needs::Feature(Feature::RecvAny));
    let batch = with(DType::I32, Needs::Op(OpKind::Batch));
    let beside = with(DType::F32, Needs::Sum);
    let mut all = Vec::new();
    for &world in worlds.or(&[2, 3, 4]) {
        all.extend([
            Case::new("p2p::every_dtype_and_size", world, &both, then_leave(every_dtype)),
            Case::new(
                "p2p::both_receive_first_then_send",
                world,
                &both,
                then_leave(receive_first),
            ),
            Case::new("p2p::order_per_peer_and_tag", world, &ordered, then_leave(order)),
            Case::new(
                "p2p::tags_match_out_of_order",
                world,
                &tags,
                then_leave(tags_match),
            ),
            Case::new(
                "p2p::many_tags_in_flight_out_of_order",
                world,
                &tags,
                then_leave(many_tags),
            ),
            Case::new(
                "p2p::receive_from_any_names_the_sender",
                world,
                &any,
                then_leave(receive_any),
            ),
            Case::new("p2p::batch_in_any_order", world, &batch, then_leave(batches)),
            Case::new(
                "p2p::beside_collectives",
                world,
                &beside,
                then_leave(beside_collectives),
            ),
        ]);
    }
    let mut all: Vec<Case> = all.into_iter().map(Case::sharing).collect();
    let dies = [Needs::RealProcesses, Needs::Feature(Feature::Abort)];
    let dies = [&tags[..], &[Needs::Feature(Feature::RecvAny)], &dies].concat();
    for &world in worlds.or(&[2, 3, 4]) {
        for victim in victims(world) {
            let name = match victim {
                0 => "p2p::a_killed_rank_0_ends_every_message_that_waits",
                _ => "p2p::a_killed_peer_ends_every_message_that_waits",
            };
            all.push(Case::new(name, world, &dies, move |rank| killed(rank, victim)).killing(victim));
        }
    }
    all
}

/// Wraps a case: a rank that is done leaves in good order, since others may still be exchanging messages.
fn then_leave(body: fn(&Rank, &dyn ProcessGroup) -> Outcome) -> impl Fn(&Rank) -> Outcome {
    move |rank| {
        let group = rank.group()?;
        body(rank, group.as_ref())?;
        rank.leave(group.as_ref())
    }
}

/// `tag`, or 0 for a group that has none.
pub(crate) fn tag_of(group: &dyn ProcessGroup, tag: u32) -> u32 {
    if group.capabilities().has(Feature::Tags) {
        tag
    } else {
        0
    }
}

fn next(rank: &Rank) -> u32 {
    (rank.rank + 1) % rank.world
}

fn previous(rank: &Rank) -> u32 {
    (rank.rank + rank.world - 1) % rank.world
}

fn every_dtype(rank: &Rank, group: &dyn ProcessGroup) -> Outcome {
    for dtype in DType::ALL {
        if !group.capabilities().moves.contains(dtype) {
            continue;
        }
        for count in SIZES.into_iter().chain([LARGE]) {
            let tag = tag_of(group, 3);
            let sent = group.send(pattern(dtype, rank.rank, count), next(rank), tag)?;
            let received = group.recv(Tensor::zeros(dtype, count), previous(rank), tag)?;
            let completion = received.take()?;
            ensure!(
                completion.source == Some(previous(rank)),
                "the source is {:?}, expected {}",
                completion.source,
                previous(rank)
            );
            check_pattern(
                "recv",
                dtype,
                completion.into_tensor()?.bytes(),
                previous(rank),
                0,
            )?;
            check_pattern(
                "the sent tensor",
                dtype,
                sent.take_tensor()?.bytes(),
                rank.rank,
                0,
            )?;
        }
    }
    Ok(())
}

/// All ranks wait for a message before they send one: only a group that runs both at once gets through.
fn receive_first(rank: &Rank, group: &dyn ProcessGroup) -> Outcome {
    let received = group.recv(Tensor::zeros(DType::F32, LARGE), previous(rank), 0)?;
    let sent = group.send(pattern(DType::F32, rank.rank, LARGE), next(rank), 0)?;
    check_pattern(
        "recv",
        DType::F32,
        received.take_tensor()?.bytes(),
        previous(rank),
        0,
    )?;
    Ok(sent.wait_done()?)
}

fn order(rank: &Rank, group: &dyn ProcessGroup) -> Outcome {
    let tag = tag_of(group, 1);
    let mut works = Vec::new();
    for i in 0..50u32 {
        works.push(group.send(
            Tensor::from_vec(vec![i; (i as usize * 97) % 500 + 1]),
            next(rank),
            tag,
        )?);
    }
    for i in 0..50u32 {
        let n = (i as usize * 97) % 500 + 1;
        let work = group.recv(Tensor::zeros(DType::U32, n), previous(rank), tag)?;
        let got = work.take_tensor()?.into_vec::<u32>()?;
        ensure!(got == vec![i; n], "message {i} holds {:?}", got.first());
    }
    works.iter().try_for_each(|w| w.wait_done())?;
    // Those that wait before anything is sent are served in their order, too.
    let receives: Vec<_> = (0..10)
        .map(|_| group.recv(Tensor::zeros(DType::U32, 3), previous(rank), tag))
        .collect::<Result<_, _>>()?;
    rank.meet("receives are posted")?;
    let sends: Vec<_> = (0..10u32)
        .map(|i| group.send(Tensor::from_vec(vec![i; 3]), next(rank), tag))
        .collect::<Result<_, _>>()?;
    for (i, work) in receives.iter().enumerate() {
        let got = work.take_tensor()?.into_vec::<u32>()?;
        ensure!(
            got == [i as u32; 3],
            "receive {i} of those that waited got {got:?}"
        );
    }
    sends.iter().try_for_each(|w| w.wait_done())?;
    Ok(())
}

fn tags_match(rank: &Rank, group: &dyn ProcessGroup) -> Outcome {
    let mut sends = Vec::new();
    for tag in 0..8u32 {
        sends.push(group.send(Tensor::from_vec(vec![tag * 10 + rank.rank; 4]), next(rank), tag)?);
    }
    for tag in (0..8u32).rev() {
        let work = group.recv(Tensor::zeros(DType::U32, 4), previous(rank), tag)?;
        let got = work.take_tensor()?.into_vec::<u32>()?;
        let want = tag * 10 + previous(rank);
        ensure!(got == [want; 4], "tag {tag} brought {got:?}, expected {want}");
    }
    sends.iter().try_for_each(|w| w.wait_done())?;
    Ok(())
}

/// All sends are submitted before the first receive, and all receives before one has ended. Each message has its own length.
fn many_tags(rank: &Rank, group: &dyn ProcessGroup) -> Outcome {
    const TAGS: u32 = 24;
    let words = |tag: u32, from: u32| vec![tag * 10 + from; 4 + tag as usize * 3 % 7];
    let sends: Vec<_> = (0..TAGS)
        .map(|tag| group.send(Tensor::from_vec(words(tag, rank.rank)), next(rank), tag))
        .collect::<Result<_, _>>()?;
    // 5 and 24 have no common factor: every tag once, in an order that is neither theirs nor its reverse.
    let order = (0..TAGS).map(|n| (n * 5 + 3) % TAGS);
    let receives: Vec<_> = order
        .map(|tag| {
            let into = Tensor::zeros(DType::U32, words(tag, 0).len());
            group.recv(into, previous(rank), tag).map(|work| (tag, work))
        })
        .collect::<Result<_, _>>()?;
    for (tag, work) in receives {
        let got = work.take_tensor()?.into_vec::<u32>()?;
        ensure!(got == words(tag, previous(rank)), "tag {tag} brought {got:?}");
    }
    sends.iter().try_for_each(|w| w.wait_done())?;
    Ok(())
}

/// Which ranks die, each in a case of its own: the last, and in small worlds the first, which a backend may have given more to do.
pub(crate) fn victims(world: u32) -> Vec<u32> {
    match world {
        2 | 3 => vec![world - 1, 0],
        _ => vec![world - 1],
    }
}

/// Rank `victim` dies while the others wait for it at both ends of messages.
fn killed(rank: &Rank, victim: u32) -> Outcome {
    let group = rank.group()?;
    rank.meet("configured")?;
    if rank.rank == victim {
        rank.meet("submitted")?;
        return rank.die();
    }
    let two = || Tensor::zeros(DType::U32, 2);
    let pending = [
        group.recv(two(), victim, 1)?,
        group.recv_any(two(), 2)?,
        group.send(two(), victim, 3)?,
    ];
    rank.meet("submitted")?;
    for work in pending {
        let Err(e) = work.wait(rank.soon()) else {
            return Err(Failure::new("a message of a dead rank arrived"));
        };
        ensure!(
            e.kind() == ErrorKind::PeerLost && e.context().peer == Some(victim),
            "rank {}: {:?}: {e}",
            rank.rank,
            e.kind()
        );
        ensure!(work.recover().len() == 1, "the tensor did not come back");
    }
    Ok(())
}

fn receive_any(rank: &Rank, group: &dyn ProcessGroup) -> Outcome {
    if rank.rank != 0 {
        for i in 0..10u32 {
            group
                .send(Tensor::from_vec(vec![rank.rank, i]), 0, tag_of(group, 5))?
                .wait_done()?;
        }
        return Ok(());
    }
    let mut seen = vec![0u32; rank.world as usize];
    for _ in 0..10 * (rank.world - 1) {
        let completion = group
            .recv_any(Tensor::zeros(DType::U32, 2), tag_of(group, 5))?
            .take()?;
        let source = completion.source;
        let got = completion.into_tensor()?.into_vec::<u32>()?;
        let [from, i] = got.as_slice() else {
            return Err(Failure::new("two elements were expected"));
        };
        ensure!(
            source == Some(*from),
            "a message of rank {from} is said to come from {source:?}"
        );
        let expected = seen
            .get_mut(*from as usize)
            .ok_or_else(|| Failure::new(format!("rank {from} does not exist")))?;
        ensure!(i == expected, "message {i} of rank {from} came before {expected}");
        *expected += 1;
    }
    Ok(())
}

fn batches(rank: &Rank, group: &dyn ProcessGroup) -> Outcome {
    let mut ops = Vec::new();
    // Receives before sends on even ranks, after them on odd ones.
    for step in 1..rank.world {
        let to = (rank.rank + step) % rank.world;
        let from = (rank.rank + rank.world - step) % rank.world;
        let send = Collective::Send {
            tensor: pattern(DType::I32, rank.rank, 5000 + step as usize),
            peer: to,
            tag: tag_of(group, step),
        };
        let receive = Collective::Recv {
            tensor: Tensor::zeros(DType::I32, 5000 + step as usize),
            peer: Some(from),
            tag: tag_of(group, step),
        };
        if rank.rank.is_multiple_of(2) {
            ops.extend([receive, send]);
        } else {
            ops.extend([send, receive]);
        }
    }
    let given = ops.len();
    let tensors = group.batch(ops)?.take()?.tensors;
    came_back(&tensors, given)?;
    for (pair, step) in tensors.chunks_exact(2).zip(1..) {
        let [first, second] = pair else { continue };
        let (sent, received) = if rank.rank.is_multiple_of(2) {
            (second, first)
        } else {
            (first, second)
        };
        let from = (rank.rank + rank.world - step) % rank.world;
        check_pattern("sent in a batch", DType::I32, sent.bytes(), rank.rank, 0)?;
        check_pattern("received in a batch", DType::I32, received.bytes(), from, 0)?;
    }
    Ok(())
}

/// A message that was not received yet does not hold up a collective, nor the other way round.
fn beside_collectives(rank: &Rank, group: &dyn ProcessGroup) -> Outcome {
    let sent = group.send(
        pattern(DType::F32, rank.rank, LARGE),
        next(rank),
        tag_of(group, 7),
    )?;
    let probe = Probe::of(group, DType::I32);
    for _ in 0..5 {
        probe.sum(group, "a sum beside a message", (1, rank.world as i32), 3000)?;
    }
    let received = group.recv(Tensor::zeros(DType::F32, LARGE), previous(rank), tag_of(group, 7))?;
    check_pattern(
        "recv",
        DType::F32,
        received.take_tensor()?.bytes(),
        previous(rank),
        0,
    )?;
    Ok(sent.wait_done()?)
}

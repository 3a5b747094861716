//! The order in which gradients come: learnt with the first step, the same on all replicas, a part of the state.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::cell::RefCell;
use std::rc::Rc;

use ftcore::{ErrorKind, Result, Tensor};
use oxccl_ddp::{Ddp, DdpConfig, Sink, Slot};
use replica::StateDict;
use training_rig::{Nothing, ScriptedReplica, Source};

/// The values of each bucket that was sent, and of each order.
type Sent = Rc<RefCell<Vec<Vec<f32>>>>;

/// A replica beside another one that sends the same gradients, and came to them in the order `other`: positions by slot, or the same ones.
fn beside(other: Option<[f32; 3]>) -> (ScriptedReplica, Sent) {
    let sent = Sent::default();
    let seen = sent.clone();
    let replica = ScriptedReplica::by_step(move |_, own| {
        seen.borrow_mut().push(own.to_vec());
        match other {
            // Gradients come in buckets of two.
            Some(other) if own.len() == other.len() => own
                .iter()
                .zip(other)
                .map(|(own, other)| (own + other) / 2.0)
                .collect(),
            _ => own.to_vec(),
        }
    });
    (replica, sent)
}

fn made(replica: ScriptedReplica) -> Ddp<ScriptedReplica> {
    let config = DdpConfig {
        first_bucket_elements: 2,
        bucket_elements: 2,
        ..DdpConfig::default()
    };
    Ddp::new(replica, &[Slot::f32(2); 3], config).unwrap()
}

/// A step whose backward pass comes to the slots in `order`; how many buckets had left after each push. A slot's gradient is its number.
fn step(d: &mut Ddp<ScriptedReplica>, sent: &Sent, order: &[usize]) -> Vec<usize> {
    sent.borrow_mut().clear();
    let mut left = Vec::new();
    let compute = |_: &mut Nothing, _: u32, sink: &mut Sink<'_>| {
        order.iter().try_for_each(|&slot| {
            sink.push(slot, &[slot as f32 + 1.0; 2])?;
            left.push(sent.borrow().len());
            Ok(())
        })
    };
    let apply = |_: &mut Nothing, averages: &[Tensor]| {
        for (slot, average) in averages.iter().enumerate() {
            let expected = if order.contains(&slot) {
                slot as f32 + 1.0
            } else {
                0.0
            };
            assert_eq!(average.as_slice::<f32>().unwrap(), [expected; 2], "slot {slot}");
        }
        Ok(())
    };
    d.step_with(&mut Nothing, compute, apply).unwrap();
    left
}

#[test]
fn from_the_second_step_on_each_bucket_leaves_with_the_push_that_fills_it_whatever_the_order_of_the_slots() {
    let (replica, sent) = beside(None);
    let mut d = made(replica);
    assert_eq!(
        step(&mut d, &sent, &[1, 0, 2]),
        [0, 0, 3],
        "they are dealt from the last slot to the first"
    );
    assert_eq!(
        *sent.borrow(),
        [vec![3.0; 2], vec![2.0; 2], vec![1.0; 2], vec![1.0, 0.0, 2.0]],
        "with the step the positions of the slots are sent"
    );
    for _ in 0..2 {
        assert_eq!(step(&mut d, &sent, &[1, 0, 2]), [1, 2, 3]);
        assert_eq!(
            *sent.borrow(),
            [[2.0; 2], [1.0; 2], [3.0; 2]],
            "it is learnt once"
        );
    }
    // Another order, or a slot that is left out, is no error: buckets wait for each other.
    assert_eq!(step(&mut d, &sent, &[2, 0]), [0, 0]);
    assert_eq!(*sent.borrow(), [[0.0; 2], [1.0; 2], [3.0; 2]]);
}

#[test]
fn replicas_that_came_in_different_orders_deal_by_the_mean_of_them() {
    let (replica, sent) = beside(Some([2.0, 1.0, 0.0]));
    let mut d = made(replica);
    step(&mut d, &sent, &[1, 2, 0]);
    // Positions 2, 0, 1 here and 2, 1, 0 there: slots 1 and 2 are equal, and go as they were dealt before.
    step(&mut d, &sent, &[1, 2, 0]);
    assert_eq!(*sent.borrow(), [[3.0; 2], [2.0; 2], [1.0; 2]]);
    // The other one came earlier to slot 0 than this one came late to it.
    let (replica, sent) = beside(Some([0.0, 4.0, 5.0]));
    let mut d = made(replica);
    step(&mut d, &sent, &[1, 2, 0]);
    step(&mut d, &sent, &[1, 2, 0]);
    assert_eq!(*sent.borrow(), [[1.0; 2], [2.0; 2], [3.0; 2]]);
}

#[test]
fn a_step_that_is_done_again_sends_the_order_again_and_only_a_committed_one_is_learnt() {
    let (mut replica, sent) = beside(None);
    replica.reductions = [true, false].into();
    let mut d = made(replica);
    step(&mut d, &sent, &[0, 1, 2]);
    let orders = |sent: &Sent| sent.borrow().iter().filter(|v| **v == [0.0, 1.0, 2.0]).count();
    assert_eq!((sent.borrow().len(), orders(&sent)), (8, 2));
    assert_eq!(step(&mut d, &sent, &[0, 1, 2]), [1, 2, 3]);
}

#[test]
fn a_replica_that_heals_deals_as_its_source_does_and_so_does_one_that_comes_back_from_disk() {
    let (replica, sent) = beside(None);
    let mut d = made(replica);
    step(&mut d, &sent, &[1, 0, 2]);
    let saved = d.save(&mut Nothing).unwrap();
    assert_eq!(saved.get_i64s("ddp.order").unwrap(), [1, 0, 2]);

    let (mut replica, sent) = beside(None);
    replica.heal = Some(Source::Now(5, d.save(&mut Nothing).unwrap()));
    let mut healed = made(replica);
    // It does not contribute: nothing is computed, and nothing to be learnt is sent.
    let report = healed
        .step_with(&mut Nothing, |_, _, _| panic!("it healed"), |_, _| Ok(()))
        .unwrap();
    assert!(report.healed.is_some());
    assert_eq!(*sent.borrow(), [[0.0; 2]; 3]);
    assert_eq!(step(&mut healed, &sent, &[1, 0, 2]), [1, 2, 3]);

    let (replica, sent) = beside(None);
    let mut restored = made(replica);
    restored.restore(&saved, &mut Nothing).unwrap();
    assert_eq!(step(&mut restored, &sent, &[1, 0, 2]), [1, 2, 3]);
}

#[test]
fn a_replica_that_heals_into_the_step_that_learns_sends_zeros_for_the_order_and_learns_that_of_the_others() {
    let (mut replica, sent) = beside(Some([1.0, 0.0, 2.0]));
    replica.heal = Some(Source::Now(0, StateDict::new()));
    let mut d = made(replica);
    d.step_with(&mut Nothing, |_, _, _| panic!("it healed"), |_, _| Ok(()))
        .unwrap();
    assert_eq!(
        *sent.borrow(),
        [vec![0.0; 2], vec![0.0; 2], vec![0.0; 2], vec![0.0; 3]]
    );
    assert_eq!(step(&mut d, &sent, &[1, 0, 2]), [1, 2, 3]);
}

#[test]
fn gradients_that_come_all_at_once_and_a_single_bucket_have_no_order() {
    let (replica, sent) = beside(None);
    let mut d = made(replica);
    let gradients = |_: &mut Nothing, _: &_| Ok(vec![vec![1.0; 2]; 3]);
    d.step(&mut Nothing, gradients, |_, _| Ok(())).unwrap();
    assert_eq!(sent.borrow().len(), 3);
    assert!(d.save(&mut Nothing).unwrap().is_empty());
    let (replica, sent) = beside(None);
    let mut d = Ddp::new(replica, &[Slot::f32(2); 3], DdpConfig::default()).unwrap();
    step(&mut d, &sent, &[0, 1, 2]);
    assert_eq!(sent.borrow().len(), 1);
}

#[test]
fn an_order_of_other_slots_is_refused() {
    for order in [&[0, 1][..], &[0, 1, 1], &[1, 2, 3], &[-1, 0, 1]] {
        let mut saved = StateDict::new();
        saved.insert_i64s("ddp.order", order).unwrap();
        let (replica, _) = beside(None);
        let refused: Result<()> = made(replica).restore(&saved, &mut Nothing);
        let e = refused.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
        assert!(e.to_string().contains("order"), "{e}");
    }
}

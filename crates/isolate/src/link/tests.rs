//! What a child may say, and what is left to its keeper to send.

use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;

use ftcore::Device;

use super::*;
use crate::wire::frames::Done;

fn soon() -> Instant {
    deadline_in(Duration::from_secs(20))
}

/// A process that waits for the end of its input, the way to it, its socket and the other end of that, where the child would be.
pub(crate) fn linked() -> (Child, Arc<Link>, Arc<OwnedFd>, Receiver) {
    let child = Command::new("cat")
        .stdin(Stdio::piped())
        .process_group(0)
        .spawn()
        .unwrap();
    let ((socket, far), (express, _)) = (channel::pair().unwrap(), channel::pair().unwrap());
    let socket = Arc::new(socket);
    let options = IsolateOptions::new("gloo", Device::CPU);
    let link = Link::new(&child, socket.clone(), express, &options, Arc::default()).unwrap();
    (child, Arc::new(link), socket, Receiver::new(Arc::new(far), false))
}

/// As [`linked`], of a child that was collected.
fn orphaned() -> (Arc<Link>, Receiver) {
    let (mut child, link, _, far) = linked();
    child.kill().unwrap();
    child.wait().unwrap();
    (link, far)
}

#[test]
fn the_end_of_an_operation_that_was_never_begun_is_refused() {
    let (link, _far) = orphaned();
    let end = |id| Report::Done {
        done: Done {
            id,
            group: 0,
            released: true,
            fatal: false,
            result: Ok((None, 1)),
            sent: 0,
            received: 0,
        },
    };
    let begun = link.next_id();
    link.carry_out(end(begun)).unwrap();
    let refused = link.carry_out(end(begun + 1)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Protocol);
    assert!(
        refused.message().contains("operation 1, which was never begun"),
        "{refused}"
    );
}

#[test]
fn the_failure_of_a_group_that_was_never_made_is_refused() {
    let (link, _far) = orphaned();
    let failure = |group| Report::Failed {
        group,
        epoch: Epoch(1),
        error: Error::new(ErrorKind::Backend, "broken"),
    };
    link.carry_out(failure(0)).unwrap();
    let refused = link.carry_out(failure(1)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Protocol, "{refused}");
    let part = Claim::another(link.clone());
    link.carry_out(failure(part.number)).unwrap();
    link.carry_out(failure(part.number + 1)).unwrap_err();
}

#[test]
fn a_child_whose_store_calls_are_not_served_any_more_is_not_configured_again() {
    let (link, _far) = orphaned();
    let (ours, childs) = channel::pair().unwrap();
    link.set_stores(Stores::serve(ours, link.pid).unwrap());
    assert!(link.is_fresh());
    // The length of a frame that is none.
    channel::send(&childs, &[0xff; 8], &[], soon()).unwrap();
    let until = soon();
    while link.is_fresh() {
        assert!(Instant::now() < until, "it is configured again");
        std::thread::yield_now();
    }
}

#[test]
fn who_waits_for_the_first_words_of_a_child_that_is_gone_is_told_why() {
    let (link, _far) = orphaned();
    link.collected(&Error::new(ErrorKind::Unavailable, "exited with status 1"));
    let (greeting, ready) = sync_channel(1);
    link.expect_greeting(greeting);
    let error = ready.try_recv().unwrap().unwrap_err();
    assert_eq!(error.message(), "exited with status 1");
}

#[test]
fn what_is_left_to_the_keeper_to_send_neither_holds_it_up_nor_is_lost_while_another_thread_sends() {
    let (link, mut far) = orphaned();
    let sending = link.sending();
    link.order(Order::Release { group: 1 });
    let (flushed, done) = channel();
    let keeper = {
        let link = link.clone();
        std::thread::spawn(move || flushed.send(link.flush(true)))
    };
    // It would wait for `sending`, which this thread has.
    let turn = done.recv_timeout(time_left(soon()));
    turn.expect("the keeper waits for another thread").unwrap();
    keeper.join().unwrap().unwrap();
    assert!(link.has_orders());
    drop(sending);
    link.flush(true).unwrap();
    assert!(!link.has_orders());
    far.fill(false).unwrap();
    let frame = Order::Release { group: 1 }.encode().unwrap();
    assert_eq!(far.next().unwrap(), frame.get(4..));
}

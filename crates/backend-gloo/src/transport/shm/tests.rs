//! Rings between two threads, and what a region refuses.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use ftcore::{ErrorKind, deadline_in};
use rustix::event::EventfdFlags;
use rustix::fs::{MemfdFlags, SealFlags};

use super::*;

/// Both ends of the pair (0, 1).
fn pair() -> (Rings<COLLECTIVES>, Rings<COLLECTIVES>, Region, Region) {
    let (a, b) = (Region::new(2).unwrap(), Region::new(2).unwrap());
    let at_a = a.open(0, 1, 1, handles(&b)).unwrap();
    let at_b = b.open(1, 0, 1, handles(&a)).unwrap();
    (at_a.collectives, at_b.collectives, a, b)
}

fn handles(of: &Region) -> Vec<OwnedFd> {
    Vec::from(of.handles().map(|fd| fd.try_clone_to_owned().unwrap()))
}

fn byte(i: usize) -> u8 {
    (i % 251) as u8 ^ (i / 251) as u8
}

#[test]
fn bytes_come_out_in_order_whatever_the_pieces_and_however_often_the_ring_wraps() {
    let (mut a, mut b, _keep_a, bell_of_b) = pair();
    let bell = bell_of_b.bells(false).unwrap().collectives;
    let total = 5 * CAPACITY + 777;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (mut sent, mut piece) = (0, 1);
            while sent < total {
                piece = (piece * 7 + 3) % 70_000 + 1;
                let room = a.writer.room(piece).unwrap().min(piece).min(total - sent);
                let data: Vec<u8> = (sent..sent + room).map(byte).collect();
                a.writer.put(&data);
                a.writer.publish();
                a.bell.ring();
                sent += room;
                if room == 0 {
                    std::thread::yield_now();
                }
            }
        });
        let (mut got, mut want) = (0, 1);
        let until = deadline_in(Duration::from_secs(20));
        while got < total {
            want = (want * 5 + 1) % 50_000 + 1;
            bell.arm(Sleep::Word);
            if b.reader.available(1).unwrap() == 0 {
                bell.sleep(until);
                assert!(Instant::now() < until, "a ring was lost");
            }
            bell.disarm();
            let data = b.reader.data(0, want);
            for (i, x) in data.iter().enumerate() {
                assert_eq!(*x, byte(got + i), "at {}", got + i);
            }
            let len = data.len();
            got += len;
            b.reader.take(len);
            b.reader.release();
        }
    });
}

/// One that arms its bell while the other publishes: without both fences each may miss what the other has just written.
#[test]
fn no_wake_up_is_lost_between_two_that_take_turns() {
    const TURNS: u64 = 100_000;
    let (a, b, region_a, region_b) = pair();
    let until = deadline_in(Duration::from_secs(60));
    let turns = |mut rings: Rings<COLLECTIVES>, bell: Bell<COLLECTIVES>, first: bool| {
        for turn in 0..TURNS {
            if turn > 0 || !first {
                loop {
                    bell.arm(Sleep::Word);
                    if rings.reader.available(8).unwrap() >= 8 {
                        bell.disarm();
                        break;
                    }
                    let short = deadline_in(Duration::from_secs(2)).min(until);
                    bell.sleep(short);
                    let lost = Instant::now() >= short && rings.reader.available(8).unwrap() >= 8;
                    assert!(!lost, "turn {turn}: slept on while a message was there");
                    assert!(Instant::now() < until, "turn {turn}: nothing comes");
                }
                assert_eq!(rings.reader.peek(), Some(turn.to_le_bytes()));
                rings.reader.take(8);
                rings.reader.release();
            }
            // What the first says in its turn n the second answers in its own n.
            let word = if first { turn } else { turn + 1 };
            assert!(rings.writer.room(8).unwrap() >= 8);
            rings.writer.put(&word.to_le_bytes());
            rings.writer.publish();
            rings.bell.ring();
        }
    };
    std::thread::scope(|scope| {
        let (bell_a, bell_b) = (
            region_a.bells(false).unwrap().collectives,
            region_b.bells(false).unwrap().collectives,
        );
        scope.spawn(move || turns(a, bell_a, true));
        scope.spawn(move || turns(b, bell_b, false));
    });
}

#[test]
fn positions_that_cannot_be_are_an_error_on_the_other_side() {
    // A writer that claims more than fits, and one that goes back.
    let (mut a, mut b, ..) = pair();
    a.writer.advance(CAPACITY + 1);
    a.writer.publish();
    assert_eq!(b.reader.available(1).unwrap_err().kind(), ErrorKind::Protocol);
    let (mut a, mut b, ..) = pair();
    a.writer.put(&[1; 200]);
    a.writer.publish();
    assert_eq!(b.reader.available(200).unwrap(), 200);
    a.writer.rewind(100);
    a.writer.publish();
    assert_eq!(b.reader.available(201).unwrap_err().kind(), ErrorKind::Protocol);
    // A reader that has read what was never written.
    let (mut a, mut b, ..) = pair();
    b.reader.take(640);
    b.reader.release();
    assert_eq!(
        a.writer.room(CAPACITY + 1).unwrap_err().kind(),
        ErrorKind::Protocol
    );
}

#[test]
fn a_full_ring_has_no_room_until_something_is_taken_and_padding_always_fits() {
    let (mut a, mut b, ..) = pair();
    a.writer.put(&vec![7; CAPACITY - 63]);
    a.writer.pad();
    a.writer.publish();
    assert_eq!(a.writer.room(1).unwrap(), 0);
    assert!(a.writer.space(10).is_empty());
    assert_eq!(b.reader.available(CAPACITY).unwrap(), CAPACITY);
    b.reader.take(100);
    b.reader.release();
    // Whole lines only.
    assert_eq!(a.writer.room(CAPACITY).unwrap(), 64);
}

#[test]
fn handles_that_are_no_sealed_region_of_the_right_size_and_no_bell_are_refused() {
    let ours = Region::new(2).unwrap();
    let good = || handles(&Region::new(2).unwrap());
    let sealed = |like: usize, seals: SealFlags| {
        let fd = rustix::fs::memfd_create("x", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(
            &fd,
            rustix::fs::fstat(ours.handles()[like]).unwrap().st_size as u64,
        )
        .unwrap();
        rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        fd
    };
    let memory = |seals| sealed(0, seals);
    let tensors = || good().remove(1);
    let first = || good().remove(0);
    let bell = || good().pop().unwrap();
    let blocking = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let file = OwnedFd::from(std::fs::File::open("/proc/self/status").unwrap());
    let ways: Vec<(&str, Vec<OwnedFd>)> = vec![
        ("nothing", Vec::new()),
        ("no bell", good().into_iter().take(1).collect()),
        ("one bell", good().into_iter().take(3).collect()),
        (
            "no seals",
            vec![memory(SealFlags::empty()), tensors(), bell(), bell()],
        ),
        (
            "may shrink",
            vec![
                memory(SealFlags::GROW | SealFlags::SEAL),
                tensors(),
                bell(),
                bell(),
            ],
        ),
        ("another size", handles(&Region::new(3).unwrap())),
        ("a file", vec![file, tensors(), bell(), bell()]),
        (
            "tensors that may shrink",
            vec![
                first(),
                sealed(1, SealFlags::GROW | SealFlags::SEAL),
                bell(),
                bell(),
            ],
        ),
        (
            "tensors that are no memory",
            vec![first(), bell(), bell(), bell()],
        ),
        ("a bell that blocks", vec![first(), tensors(), blocking(), bell()]),
        (
            "another bell that blocks",
            vec![first(), tensors(), bell(), blocking()],
        ),
    ];
    for (what, handles) in ways {
        let e = ours.open(0, 1, 1, handles).map(drop).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Protocol, "{what}: {e}");
    }
    ours.open(0, 1, 1, good()).unwrap();
}

#[test]
fn an_alarm_wakes_a_sleeper_whose_word_a_peer_has_cleared() {
    let (a, _b, _region_a, region_b) = pair();
    let bell = region_b.bells(false).unwrap().collectives;
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            let began = Instant::now();
            bell.arm(Sleep::Word);
            bell.sleep(deadline_in(Duration::from_secs(20)));
            began.elapsed()
        });
        while !sleeper.is_finished() {
            bell.alarm();
            std::thread::yield_now();
        }
        assert!(sleeper.join().unwrap() < Duration::from_secs(10));
    });
    drop(a);
}

#[test]
fn what_is_said_is_heard_once_and_also_when_its_writer_has_gone() {
    let (a, b) = (Region::new(2).unwrap(), Region::new(2).unwrap());
    let at_a = a.open(0, 1, 1, handles(&b)).unwrap();
    let mut at_b = b.open(1, 0, 1, handles(&a)).unwrap();
    let bell = b.bells(false).unwrap().thread;
    let (mut says, hears) = (at_a.notices.writer, &mut at_b.notices.reader);
    assert_eq!(hears.take().unwrap(), None);
    says.arm();
    let before = bell.count();
    says.say(&[7; NOTICE_BYTES]);
    says.say(b"and only the first counts");
    assert_ne!(bell.count(), before);
    assert!(!hears.has_ended());
    drop((says, a));
    assert!(hears.has_ended());
    assert_eq!(hears.take().unwrap(), Some(vec![7; NOTICE_BYTES]));
    assert_eq!(hears.take().unwrap(), None);
}

#[test]
fn words_that_do_not_fit_are_neither_said_nor_believed() {
    let (a, b) = (Region::new(2).unwrap(), Region::new(2).unwrap());
    let at_b = || b.open(1, 0, 1, handles(&a)).unwrap().notices.reader;
    let mut says = a.open(0, 1, 1, handles(&b)).unwrap().notices.writer;
    says.say(&[7; NOTICE_BYTES + 1]);
    assert_eq!(at_b().take().unwrap(), None);
    says.claim(NOTICE_BYTES as u32 + 1);
    assert_eq!(at_b().take().unwrap_err().kind(), ErrorKind::Protocol);
    // One whose connection was replaced by another says nothing of its end.
    says.arm();
    says.disarm();
    drop(says);
    assert!(!at_b().has_ended());
}

#[test]
fn the_bell_of_a_thread_wakes_it_and_a_ring_before_its_sleep_counts() {
    let bell = Bells::private(false).unwrap().thread;
    let counted = bell.count();
    bell.ring();
    let began = Instant::now();
    bell.sleep(counted, None);
    std::thread::scope(|scope| {
        let (bell, counted) = (&bell, bell.count());
        let sleeper = scope.spawn(move || bell.sleep(counted, Some(deadline_in(Duration::from_secs(20)))));
        bell.ring();
        sleeper.join().unwrap();
    });
    assert!(began.elapsed() < Duration::from_secs(10));
    let counted = bell.count();
    bell.sleep(counted, Some(deadline_in(Duration::from_millis(1))));
}

/// What is at the head of frame `n`, and its payload.
fn frame(n: u64) -> ([u8; 64], Vec<u8>) {
    let mut header = [0; 64];
    header[..8].copy_from_slice(&n.to_le_bytes());
    let length = (n * 37 % 101) as usize;
    (header, (0..length).map(|i| byte(i + n as usize)).collect())
}

fn send_frame(writer: &mut Writer, n: u64) {
    let (header, payload) = frame(n);
    let from = writer.position();
    writer.put(&header);
    writer.put(&payload);
    writer.pad();
    writer.publish();
    writer.show(from, n, &payload);
}

/// Takes frame `n` from its line, or else from the ring; true if from its line.
fn take_frame(reader: &mut Reader, n: u64) -> bool {
    let (header, payload) = frame(n);
    let shown = reader.shown(n, 64 + payload.len());
    if let Some(shown) = shown.as_ref().filter(|_| payload.len() <= SHOWN_BYTES) {
        assert_eq!(shown.bytes(payload.len()), payload, "frame {n}");
    }
    assert_eq!(reader.data(0, 64), header, "frame {n}");
    reader.take(64);
    let mut got = Vec::new();
    while got.len() < payload.len() {
        let data = reader.data(0, payload.len() - got.len());
        assert!(!data.is_empty(), "frame {n}");
        got.extend_from_slice(data);
        reader.take(data.len());
    }
    assert_eq!(got, payload, "frame {n}");
    reader.pad();
    reader.release();
    shown.is_some()
}

#[test]
fn a_frame_is_on_its_line_for_who_knows_its_digest_and_length() {
    let (mut a, mut b, _keep_a, _keep_b) = pair();
    let length = 64 + frame(1).1.len();
    assert!(b.reader.shown(1, length).is_none(), "nothing was written");
    send_frame(&mut a.writer, 1);
    assert!(b.reader.shown(2, length).is_none(), "another header");
    assert!(b.reader.shown(1, length + 64).is_none(), "another length");
    assert!(take_frame(&mut b.reader, 1));
    assert!(b.reader.shown(1, length).is_none(), "it was taken");
}

#[test]
fn a_line_that_a_later_frame_has_taken_is_left_alone() {
    let (mut a, mut b, _keep_a, _keep_b) = pair();
    (1..=20).for_each(|n| send_frame(&mut a.writer, n));
    assert!(b.reader.available(CAPACITY).unwrap() > 0);
    assert!(!take_frame(&mut b.reader, 1), "its line is a later frame's");
    for n in 2..20 {
        take_frame(&mut b.reader, n);
    }
    assert!(take_frame(&mut b.reader, 20));
}

#[test]
fn a_line_is_read_whole_while_its_writer_runs_ahead() {
    const FRAMES: u64 = 100_000;
    let (mut a, mut b, _keep_a, _keep_b) = pair();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for n in 0..FRAMES {
                while a.writer.room(256).unwrap() < 256 {
                    std::thread::yield_now();
                }
                send_frame(&mut a.writer, n);
            }
        });
        let until = deadline_in(Duration::from_secs(60));
        for n in 0..FRAMES {
            let length = 64 + frame(n).1.len();
            while b.reader.shown(n, length).is_none() && b.reader.available(length).unwrap() < length {
                assert!(Instant::now() < until, "frame {n} did not come");
                std::hint::spin_loop();
            }
            take_frame(&mut b.reader, n);
        }
    });
}

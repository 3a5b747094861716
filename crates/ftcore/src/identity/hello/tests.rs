//! The hello between two ends, and between one end and a hostile one: nothing that was seen before, turned round, cut or changed is believed.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::Epoch;
use crate::identity::Secret;

fn caller(topic: Topic, nonce: u8) -> Handshake {
    Handshake::call_with(Credentials::in_memory("job-7", 1), topic, [nonce; NONCE])
}

fn listener(topic: Topic, nonce: u8) -> Handshake {
    Handshake::listen_with(Credentials::in_memory("job-7", 1), topic, [nonce; NONCE])
}

fn gloo() -> Topic {
    Topic::new("gloo", Epoch(7), 3, 1)
}

fn take_out(from: &mut Handshake) -> Vec<u8> {
    let bytes = from.outgoing().to_vec();
    from.sent(bytes.len());
    bytes
}

/// Feeds `bytes`, `at_once` at a time; how many it took, or the refusal.
fn feed(to: &mut Handshake, bytes: &[u8], at_once: usize) -> std::result::Result<usize, Refused> {
    let mut taken = 0;
    while taken < bytes.len() {
        let room = to.room();
        let n = room.len().min(at_once).min(bytes.len() - taken);
        if n == 0 {
            break;
        }
        room[..n].copy_from_slice(&bytes[taken..taken + n]);
        to.received(n)?;
        taken += n;
    }
    Ok(taken)
}

/// Both ends until nothing moves; what each said, and the first refusal of each.
struct Met {
    caller: Vec<u8>,
    listener: Vec<u8>,
    refusals: [Option<Refused>; 2],
    done: [bool; 2],
}

fn meet(mut caller: Handshake, mut listener: Handshake, at_once: usize) -> Met {
    let mut met = Met {
        caller: Vec::new(),
        listener: Vec::new(),
        refusals: [None, None],
        done: [false; 2],
    };
    loop {
        let there = take_out(&mut caller);
        let back = take_out(&mut listener);
        if there.is_empty() && back.is_empty() {
            met.done = [caller.is_done(), listener.is_done()];
            return met;
        }
        met.caller.extend(&there);
        met.listener.extend(&back);
        if let Err(refused) = feed(&mut listener, &there, at_once) {
            met.refusals[1].get_or_insert(refused);
        }
        if let Err(refused) = feed(&mut caller, &back, at_once) {
            met.refusals[0].get_or_insert(refused);
        }
    }
}

fn reasons(met: &Met) -> [Option<(Reason, bool)>; 2] {
    [0, 1].map(|i| met.refusals[i].as_ref().map(|r| (r.reason, r.told)))
}

#[test]
fn two_ends_that_hold_the_secret_meet_in_three_messages_however_they_are_cut() {
    for at_once in [1, 7, 16, 1000] {
        let topic = Topic::new("gloo", Epoch(7), NO_RANK, 1);
        let met = meet(caller(gloo(), 2), listener(topic, 3), at_once);
        assert_eq!(met.done, [true, true]);
        assert_eq!((met.caller.len(), met.listener.len()), (OPEN + PROOF, ANSWER));
    }
    let mut there = listener(Topic::new("gloo", Epoch(7), NO_RANK, 1), 3);
    feed(&mut there, caller(gloo(), 2).outgoing(), 1000).unwrap();
    assert_eq!(there.topic().from(), 3);
}

#[test]
fn two_nonces_of_the_system_are_never_alike() {
    let open = || {
        Handshake::call(Credentials::in_memory("job-7", 1), gloo())
            .unwrap()
            .outgoing()
            .to_vec()
    };
    assert_ne!(open(), open());
}

#[test]
fn what_comes_after_the_hello_is_left_in_the_stream() {
    let (mut a, mut b) = (caller(gloo(), 2), listener(gloo(), 3));
    feed(&mut b, &take_out(&mut a), 1000).unwrap();
    let mut answer = take_out(&mut b);
    answer.extend(b"what the protocol says next");
    assert_eq!(feed(&mut a, &answer, 1000).unwrap(), ANSWER);
    assert_eq!(a.room().len(), 0);
    let mut proof = take_out(&mut a);
    proof.extend(b"more");
    assert_eq!(feed(&mut b, &proof, 1000).unwrap(), PROOF);
    assert!(a.is_done() && b.is_done());
}

#[test]
fn another_secret_or_job_is_refused_by_the_caller_and_the_listener_hears_of_it() {
    for (job, secret) in [("job-7", 9), ("job-8", 1)] {
        let stranger = Handshake::call_with(Credentials::in_memory(job, secret), gloo(), [2; NONCE]);
        let met = meet(stranger, listener(gloo(), 3), 1000);
        assert_eq!(met.done, [false, false]);
        let expected = [
            Some((Reason::WrongProof, false)),
            Some((Reason::WrongProof, true)),
        ];
        assert_eq!(reasons(&met), expected);
        let text = met.refusals[1].as_ref().unwrap().to_string();
        assert!(
            text.contains("job-7") && text.contains("other credentials"),
            "{text}"
        );
    }
}

#[test]
fn a_caller_that_skips_its_check_of_the_listener_is_refused_for_its_proof() {
    let mut there = listener(gloo(), 3);
    feed(&mut there, caller(gloo(), 2).outgoing(), 1000).unwrap();
    take_out(&mut there);
    let proof = [&header(KIND_PROOF)[..], &[0; MAC]].concat();
    let refused = feed(&mut there, &proof, 1000).unwrap_err();
    assert_eq!((refused.reason, refused.told), (Reason::WrongProof, false));
    assert_eq!(there.outgoing(), refusal(Reason::WrongProof));
    assert!(!there.is_done() && there.room().is_empty());
}

#[test]
fn a_hello_for_another_service_epoch_or_rank_is_refused_on_both_sides() {
    for other in [
        Topic::new("store", Epoch(7), 3, 1),
        Topic::new("gloo", Epoch(8), 3, 1),
        Topic::new("gloo", Epoch(7), 3, 2),
    ] {
        let met = meet(caller(other, 2), listener(gloo(), 3), 1000);
        let expected = [
            Some((Reason::OtherTopic, true)),
            Some((Reason::OtherTopic, false)),
        ];
        assert_eq!(reasons(&met), expected);
        let text = met.refusals[1].as_ref().unwrap().to_string();
        assert!(text.contains("gloo of epoch 7 of rank 1"), "{text}");
    }
}

#[test]
fn an_answer_for_another_caller_is_refused() {
    // The same nonces, another rank: only what the caller means counts.
    let mut there = listener(gloo(), 3);
    feed(
        &mut there,
        caller(Topic::new("gloo", Epoch(7), 2, 1), 2).outgoing(),
        1000,
    )
    .unwrap();
    let answer = take_out(&mut there);
    let refused = feed(&mut caller(gloo(), 2), &answer, 1000).unwrap_err();
    assert_eq!(refused.reason, Reason::WrongProof);
}

#[test]
fn a_recorded_hello_opens_nothing() {
    let recorded = meet(caller(gloo(), 2), listener(gloo(), 3), 1000);
    let mut there = listener(gloo(), 4);
    let refused = feed(&mut there, &recorded.caller, 1000).unwrap_err();
    assert_eq!((refused.reason, refused.told), (Reason::WrongProof, false));
    // Nor does a recorded answer.
    let refused = feed(&mut caller(gloo(), 5), &recorded.listener, 1000).unwrap_err();
    assert_eq!(refused.reason, Reason::WrongProof);
}

#[test]
fn what_one_end_says_is_not_believed_when_it_is_sent_back() {
    // A caller gets its own `Open`, a listener its own `Answer`.
    let mut a = caller(gloo(), 2);
    let open = take_out(&mut a);
    assert_eq!(feed(&mut a, &open, 1000).unwrap_err().reason, Reason::NoHello);
    let mut b = listener(gloo(), 3);
    feed(&mut b, &open, 1000).unwrap();
    let answer = take_out(&mut b);
    assert_eq!(feed(&mut b, &answer, 1000).unwrap_err().reason, Reason::NoHello);
    // The listener's proof with the caller's header: the labels differ.
    let mut b = listener(gloo(), 3);
    feed(&mut b, &open, 1000).unwrap();
    let answer = take_out(&mut b);
    let proof = [&header(KIND_PROOF)[..], &answer[ANSWER - MAC..]].concat();
    assert_eq!(feed(&mut b, &proof, 1000).unwrap_err().reason, Reason::WrongProof);
}

#[test]
fn an_end_without_credentials_recognises_a_hello_and_a_refusal_and_says_which_side_lacks_what() {
    let open = caller(gloo(), 2).outgoing().to_vec();
    let seen = Refused::seen_without_credentials(&open).unwrap();
    assert_eq!((seen.reason, seen.told), (Reason::NoCredentials, false));
    assert!(seen.to_string().contains("this process has none"), "{seen}");
    let mut there = listener(gloo(), 3);
    let plain = feed(&mut there, b"\0\xC1\x83\xF3\x85", 1000).unwrap_err();
    assert!(plain.to_string().contains("job-7"), "{plain}");
    let seen = Refused::seen_without_credentials(there.outgoing()).unwrap();
    assert_eq!((seen.reason, seen.told), (Reason::NoHello, true));
    assert!(
        seen.to_string().contains("asks for a job's credentials"),
        "{seen}"
    );
    for cut in 0..HEADER {
        assert_eq!(Refused::seen_without_credentials(&open[..cut]), None);
    }
    // And what the caller makes of a listener without.
    let refused = feed(&mut caller(gloo(), 2), &refusal(Reason::NoCredentials), 1000).unwrap_err();
    assert!(refused.to_string().contains("it has no credentials"), "{refused}");
}

#[test]
fn the_first_byte_that_does_not_fit_is_enough_to_refuse() {
    // A client without credentials may send less than a header and then wait.
    for (end, bytes) in [
        (listener(gloo(), 3), &b"\0"[..]),
        (caller(gloo(), 2), &b"\xABOXH0"[..]),
    ] {
        let mut end = end;
        assert_eq!(feed(&mut end, bytes, 1000).unwrap_err().reason, Reason::NoHello);
    }
}

/// A stream of canned input; what is written is kept.
#[derive(Default)]
struct Canned {
    input: VecDeque<io::Result<Vec<u8>>>,
    output: Vec<u8>,
}

impl Read for Canned {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.input.pop_front() {
            Some(Ok(bytes)) => {
                let n = bytes.len().min(into.len());
                into[..n].copy_from_slice(&bytes[..n]);
                if n < bytes.len() {
                    self.input.push_front(Ok(bytes[n..].to_vec()));
                }
                Ok(n)
            }
            Some(Err(e)) => Err(e),
            None => Ok(0),
        }
    }
}

impl Write for Canned {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // A few at a time, as a full socket takes them.
        let n = bytes.len().min(9);
        self.output.extend(&bytes[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_hello_over_a_stream_goes_on_where_it_stopped_and_says_how_it_ended() {
    let recorded = meet(caller(gloo(), 2), listener(gloo(), 3), 1000);
    let (first, rest) = recorded.listener.split_at(20);
    let mut stream = Canned {
        input: [
            Err(io::ErrorKind::WouldBlock.into()),
            Ok(first.to_vec()),
            Err(io::ErrorKind::WouldBlock.into()),
            Ok(rest.to_vec()),
        ]
        .into(),
        ..Canned::default()
    };
    let mut a = caller(gloo(), 2);
    assert!(!a.advance(&mut stream).unwrap());
    assert!(!a.advance(&mut stream).unwrap());
    assert!(a.advance(&mut stream).unwrap());
    assert_eq!(stream.output, recorded.caller);

    let mut cut = Canned {
        input: [Ok(first.to_vec())].into(),
        ..Canned::default()
    };
    let e = caller(gloo(), 2).advance(&mut cut).unwrap_err();
    assert_eq!(e.kind(), io::ErrorKind::UnexpectedEof, "{e}");
    assert!(Refused::of(&e).is_none());

    let mut other = Canned {
        input: [Ok(b"GET / HTTP/1.1".to_vec())].into(),
        ..Canned::default()
    };
    let e = listener(gloo(), 3).advance(&mut other).unwrap_err();
    assert_eq!(Refused::of(&e).map(Refused::reason), Some(Reason::NoHello));
    assert!(may_be_hello(&other.output), "the caller is told");
}

/// Those of `docs/credentials-data-plane.md`.
#[test]
fn the_hello_is_that_of_the_test_vectors() {
    let secret: Vec<u8> = (0..32).collect();
    let credentials = Arc::new(Credentials {
        folder: "/nowhere".into(),
        job: "job-7".to_owned(),
        secret: Secret(secret.try_into().unwrap()),
        encrypts: false,
    });
    let a = Handshake::call_with(credentials.clone(), gloo(), [0xAA; NONCE]);
    let b = Handshake::listen_with(credentials, gloo(), [0xBB; NONCE]);
    let met = meet(a, b, 1000);
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    let said = [
        ("Open", hex(&met.caller[..OPEN])),
        ("Answer", hex(&met.listener)),
        ("Proof", hex(&met.caller[OPEN..])),
    ];
    let page = include_str!("../../../../../docs/credentials-data-plane.md");
    // Written in lines, for people.
    let page: String = page.split_whitespace().collect();
    let missing: Vec<_> = said.iter().filter(|(_, bytes)| !page.contains(bytes)).collect();
    assert!(missing.is_empty(), "not on the page: {missing:#?}");
}

proptest! {
    #[test]
    fn a_changed_byte_anywhere_refuses_the_hello(at in 0usize..OPEN + ANSWER + PROOF, flip in 1u8..) {
        let (mut a, mut b) = (caller(gloo(), 2), listener(gloo(), 3));
        let mut at = Some(at);
        let mut refused = false;
        for round in 0..3 {
            let (from, to) = if round == 1 { (&mut b, &mut a) } else { (&mut a, &mut b) };
            let mut bytes = take_out(from);
            if let Some(i) = at {
                match bytes.get_mut(i) {
                    Some(byte) => { *byte ^= flip; at = None; }
                    None => at = Some(i - bytes.len()),
                }
            }
            if feed(to, &bytes, 1000).is_err() {
                refused = true;
                break;
            }
        }
        prop_assert!(refused && !(a.is_done() && b.is_done()));
    }

    #[test]
    fn a_hello_that_is_cut_short_is_never_done(at in 0usize..OPEN + PROOF) {
        let recorded = meet(caller(gloo(), 2), listener(gloo(), 3), 1000);
        let mut there = listener(gloo(), 3);
        let taken = feed(&mut there, &recorded.caller[..at.min(OPEN)], 1000).unwrap();
        take_out(&mut there);
        if at > OPEN {
            feed(&mut there, &recorded.caller[taken..at], 1000).unwrap();
        }
        prop_assert!(!there.is_done() && !there.room().is_empty());
    }

    #[test]
    fn garbage_is_refused_or_waited_for_and_never_done(bytes in proptest::collection::vec(any::<u8>(), 0..400), hello: bool, at_once in 1usize..100) {
        let mut bytes = bytes;
        if hello {
            let begin: Vec<u8> = header(KIND_OPEN).iter().copied().chain(gloo().encode()).collect();
            bytes.splice(..0, begin);
        }
        for mut end in [caller(gloo(), 2), listener(gloo(), 3)] {
            let _ = feed(&mut end, &bytes, at_once);
            prop_assert!(end.stage != Stage::Done);
        }
    }
}

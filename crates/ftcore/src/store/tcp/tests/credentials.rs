//! A store with credentials: whose connections it serves, what the others get, and that they disturb no rank.

use super::*;
use crate::Epoch;
use crate::identity::hello::{Handshake, NO_RANK, Refused, Topic, may_be_hello};

fn job() -> Arc<Credentials> {
    Credentials::in_memory("job-7", 1)
}

/// A server of that job, with limits that strangers reach.
fn guarded(limits: Limits) -> TcpStoreServer {
    let listening = listen("127.0.0.1:0").unwrap();
    TcpStoreServer::start("127.0.0.1:0", listening, Some(job()), limits).unwrap()
}

fn connect(server: &TcpStoreServer, credentials: Option<Arc<Credentials>>) -> Result<TcpStore> {
    TcpStore::connect_with(&server.local_addr().to_string(), credentials, soon())
}

fn hello() -> Handshake {
    Handshake::call(job(), Topic::new("store", Epoch(0), NO_RANK, NO_RANK)).unwrap()
}

/// Reads to the end, which must come.
fn all_of(mut stream: TcpStream) -> Vec<u8> {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => {}
        Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset, "{e}"),
    }
    rest
}

#[test]
fn clients_of_the_job_use_the_store_as_without_credentials() {
    let server = guarded(Limits::default());
    let first = connect(&server, Some(job())).unwrap();
    let second = connect(&server, Some(job())).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| first.wait(&["k"], soon()).unwrap());
        second.set("k", b"v", soon()).unwrap();
    });
    assert_eq!(first.get("k", soon()).unwrap(), b"v");
    assert_eq!(second.add("n", 5, soon()).unwrap(), 5);
}

#[test]
fn a_client_and_a_server_of_different_jobs_or_with_and_without_credentials_say_which_side_lacks_what() {
    let guarded = guarded(Limits::default());
    let open = TcpStoreServer::bind_with("127.0.0.1:0", None).unwrap();
    let good = connect(&guarded, Some(job())).unwrap();
    for (server, credentials, says) in [
        (
            &guarded,
            None,
            "asks for a job's credentials and this process has none",
        ),
        (&open, Some(job()), "it has no credentials"),
        (
            &guarded,
            Some(Credentials::in_memory("job-7", 2)),
            "does not hold the secret of job job-7",
        ),
        (
            &guarded,
            Some(Credentials::in_memory("job-8", 1)),
            "does not hold the secret of job job-8",
        ),
    ] {
        let e = connect(server, credentials).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
        assert!(e.to_string().contains(says), "{e}");
        assert!(e.to_string().contains(&server.local_addr().to_string()), "{e}");
    }
    good.set("k", b"v", soon()).unwrap();
    assert_eq!(good.get("k", soon()).unwrap(), b"v");
    let plain = connect(&open, None).unwrap();
    plain.set("k", b"v", soon()).unwrap();
}

#[test]
fn a_server_that_closes_at_the_hello_as_pytorchs_does_is_named_with_the_hello_at_the_deadline() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let torch = thread::spawn(move || {
        let mut met = 0;
        // Until the client has given up and this test connects itself.
        for stream in listener.incoming() {
            let mut first = [0; 1];
            if stream.unwrap().read_exact(&mut first).is_err() {
                return met;
            }
            assert!(may_be_hello(&first));
            met += 1;
        }
        met
    });
    let e = TcpStore::connect_with(&address, Some(job()), millis(400)).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unavailable, "{e}");
    assert!(
        e.to_string().contains("at the hello of the job's credentials"),
        "{e}"
    );
    drop(TcpStream::connect(&address).unwrap());
    assert!(torch.join().unwrap() > 0);
}

#[test]
fn what_does_not_prove_the_secret_is_closed_and_reads_and_writes_nothing() {
    let limits = Limits {
        handshake: Duration::from_millis(500),
        ..Limits::default()
    };
    let server = guarded(limits);
    let good = connect(&server, Some(job())).unwrap();
    good.set("k", b"v", soon()).unwrap();

    // PyTorch's greeting, HTTP, and a write at once: told that credentials are needed, where there is an answer at all.
    for strange in [
        HELLO.to_owned(),
        "47 4554202f20485454502f312e310d0a0d0a".to_owned(),
        format!("{HELLO} 01 {} {}", text("/k"), text("evil")),
    ] {
        let mut raw = Raw::silent(&server);
        raw.say(&strange);
        let told = all_of(raw.0);
        let refused = Refused::seen_without_credentials(&told);
        assert!(told.is_empty() || refused.is_some(), "{told:?}");
    }

    // A hello that is recorded from a client of the job, then said again.
    let mut recorded = Vec::new();
    {
        let mut raw = Raw::silent(&server);
        let mut hello = hello();
        recorded.extend(hello.outgoing());
        raw.0.write_all(hello.outgoing()).unwrap();
        hello.sent(hello.outgoing().len());
        while hello.outgoing().is_empty() {
            let room = hello.room();
            let n = room.len();
            raw.0.read_exact(room).unwrap();
            hello.received(n).unwrap();
        }
        recorded.extend(hello.outgoing());
        recorded.extend(hex(&format!("{HELLO} 01 {} {}", text("/k"), text("replayed"))));
        raw.0.write_all(hello.outgoing()).unwrap();
        // This one is served.
        raw.say(HELLO);
        raw.hears("01020304");
    }
    let mut replay = Raw::silent(&server);
    replay.0.write_all(&recorded).unwrap();
    let told = all_of(replay.0);
    assert!(
        told.len() <= 80 + 16,
        "an answer and a refusal at the most: {told:?}"
    );

    // Half a hello, and one byte at a time: closed when its time is over, however lively it is.
    let mut half = Raw::silent(&server);
    half.0.write_all(&hello().outgoing()[..40]).unwrap();
    let slow = Raw::silent(&server);
    let mut writes = slow.0.try_clone().unwrap();
    let drip = thread::spawn(move || {
        for byte in hello().outgoing() {
            if writes.write_all(&[*byte]).is_err() {
                return;
            }
            thread::sleep(Duration::from_millis(50));
        }
    });
    assert!(all_of(half.0).is_empty());
    assert!(all_of(slow.0).is_empty());
    drip.join().unwrap();

    assert_eq!(good.get("k", soon()).unwrap(), b"v");
    assert_eq!(good.num_keys(soon()).unwrap(), 1);
    until("only the good client is connected", || server.connections() == 1);
}

#[test]
fn a_flood_of_half_hellos_keeps_no_client_of_the_job_out_and_takes_bounded_room() {
    let limits = Limits {
        connections: 64,
        per_address: 64,
        ungreeted: 8,
        ..Limits::default()
    };
    let server = guarded(limits);
    let good = connect(&server, Some(job())).unwrap();
    let address = server.local_addr();
    let mut half = Vec::new();
    for i in 0..100 {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&hello().outgoing()[..i % 79]).unwrap();
        half.push(stream);
        if i % 10 == 0 {
            connect(&server, Some(job())).unwrap();
        }
    }
    until("the oldest strangers are closed", || {
        server.connections() <= 8 + 1
    });
    connect(&server, Some(job()))
        .unwrap()
        .set("k", b"v", soon())
        .unwrap();
    assert_eq!(good.get("k", soon()).unwrap(), b"v");
    drop(half);
}

#[test]
fn one_address_leaves_room_for_others() {
    let limits = Limits {
        per_address: 2,
        ..Limits::default()
    };
    let server = with_limits(limits).unwrap();
    let (first, _second) = (Raw::greeted(&server), Raw::greeted(&server));
    Raw::silent(&server).ends_closed();
    // 127.0.0.2: another address of this machine.
    let elsewhere = rustix::net::socket(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::STREAM,
        None,
    )
    .unwrap();
    let from: std::net::SocketAddr = "127.0.0.2:0".parse().unwrap();
    rustix::net::bind(&elsewhere, &from).unwrap();
    rustix::net::connect(&elsewhere, &server.local_addr()).unwrap();
    let mut other = Raw(TcpStream::from(elsewhere));
    other.say(HELLO);
    other.hears("01020304");
    drop(first);
    until("a place came free", || server.connections() == 2);
    let mut again = Raw::silent(&server);
    again.say(HELLO);
    again.hears("01020304");
}

/// Passes bytes between a client and `server`; what it changes and sees is up to `tamper`, which is given the direction (0: from the client), all
/// that went there before, and the bytes that go now.
fn between(
    server: &TcpStoreServer,
    tamper: impl Fn(usize, usize, &mut Vec<u8>) + Clone + Send + 'static,
) -> String {
    let target = server.local_addr();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        for client in listener.incoming() {
            let (client, server) = (client.unwrap(), TcpStream::connect(target).unwrap());
            for (direction, (from, to)) in [(&client, &server), (&server, &client)].into_iter().enumerate() {
                let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                let tamper = tamper.clone();
                thread::spawn(move || {
                    let mut before = 0;
                    let mut some = [0; 4096];
                    while let Ok(n @ 1..) = from.read(&mut some) {
                        let mut bytes = some[..n].to_vec();
                        tamper(direction, before, &mut bytes);
                        before += n;
                        if to.write_all(&bytes).is_err() {
                            break;
                        }
                    }
                    let _ = to.shutdown(std::net::Shutdown::Both);
                });
            }
        }
    });
    address
}

fn encrypted() -> Arc<Credentials> {
    job().with_encryption(true)
}

fn server_of(credentials: Arc<Credentials>) -> TcpStoreServer {
    TcpStoreServer::bind_with("127.0.0.1:0", Some(credentials)).unwrap()
}

#[test]
fn an_encrypted_store_is_used_as_any_other_and_its_keys_and_values_are_not_on_the_wire() {
    for encrypts in [false, true] {
        let credentials = job().with_encryption(encrypts);
        let server = server_of(credentials.clone());
        let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
        let to = seen.clone();
        let address = between(&server, move |_, _, bytes| {
            to.lock().unwrap().extend_from_slice(bytes)
        });
        let through = || TcpStore::connect_with(&address, Some(credentials.clone()), soon()).unwrap();
        let (first, second) = (through(), through());
        // Longer than a record and than every buffer.
        let long = b"sixteen letters!".repeat(30_000);
        thread::scope(|scope| {
            scope.spawn(|| first.wait(&["a key of its own"], soon()).unwrap());
            second.set("a key of its own", &long, soon()).unwrap();
        });
        assert!(first.get("a key of its own", soon()).unwrap() == long);
        // A wait that is cancelled, and calls behind it on the same connection.
        let e = first.wait(&["never"], millis(100)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
        for n in 1..100 {
            assert_eq!(first.add("n", 1, soon()).unwrap(), n);
            assert_eq!(second.compare_set("m", b"", b"v", soon()).unwrap(), b"v");
        }
        let seen = seen.lock().unwrap();
        assert!(seen.len() > 2 * long.len());
        for text in [&b"a key of its own"[..], b"sixteen letters!"] {
            let found = seen.windows(text.len()).any(|window| window == text);
            assert_eq!(found, !encrypts);
        }
    }
}

#[test]
fn a_client_of_the_job_that_takes_no_replies_is_given_up_encrypted_or_not() {
    for encrypts in [false, true] {
        let credentials = job().with_encryption(encrypts);
        let limits = Limits {
            stall: Duration::from_millis(300),
            ..Limits::default()
        };
        let listening = listen("127.0.0.1:0").unwrap();
        let server =
            TcpStoreServer::start("127.0.0.1:0", listening, Some(credentials.clone()), limits).unwrap();
        let good = connect(&server, Some(credentials.clone())).unwrap();
        good.set("k", &vec![1; 8 << 20], soon()).unwrap();
        // What the server says after the first replies is not taken any more.
        let (go_on, wait) = std::sync::mpsc::channel::<()>();
        let wait = Arc::new(std::sync::Mutex::new(wait));
        let address = between(&server, move |direction, before, _| {
            if direction == 1 && before > 64 << 10 {
                let _ = wait.lock().unwrap().recv();
            }
        });
        let greedy = TcpStore::connect_with(&address, Some(credentials), soon()).unwrap();
        thread::scope(|scope| {
            // More than the sockets on the way hold. How it ends is not the server's matter.
            scope.spawn(|| greedy.multi_get(&["k"; 8], soon()));
            until("it has asked", || server.connections() == 2);
            until("the greedy one is gone", || server.connections() == 1);
            good.set("m", b"v", soon()).unwrap();
            drop(go_on);
        });
    }
}

#[test]
fn a_store_and_a_client_that_do_not_agree_about_encryption_are_told_so() {
    for (of_server, of_client) in [(job(), encrypted()), (encrypted(), job())] {
        let e = connect(&server_of(of_server), Some(of_client)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
        assert!(e.to_string().contains("OXCCL_ENCRYPT"), "{e}");
    }
}

#[test]
fn a_byte_that_is_changed_on_the_way_to_or_from_an_encrypted_store_is_no_value() {
    // Behind the hello and the greeting.
    for (direction, behind) in [(0, 128 + 40), (1, 80 + 24)] {
        let server = server_of(encrypted());
        let address = between(&server, move |to, before, bytes| {
            if to == direction
                && before >= behind
                && let Some(last) = bytes.last_mut()
            {
                *last ^= 1;
            }
        });
        let client = TcpStore::connect_with(&address, Some(encrypted()), soon()).unwrap();
        connect(&server, Some(encrypted()))
            .unwrap()
            .set("k", b"v", soon())
            .unwrap();
        let e = client.get("k", millis(1500)).unwrap_err();
        assert!(e.to_string().contains(&address), "{e}");
        if direction == 1 {
            assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
            assert!(e.to_string().contains("does not open"), "{e}");
        }
    }
}

//! The control connections with credentials: who is met, what the others get, and that strangers at rank 0's port change nothing.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ftcore::identity::hello::{Handshake, Reason, Refused, Topic};
use ftcore::{Credentials, Epoch, ErrorKind, GroupOptions, InMemoryStore, ProcessGroup, Store, deadline_in};

use super::kit::*;
use super::{Scenario, scenario};

const SOON: Duration = Duration::from_secs(20);
const KEY: &str = "errors/1/nccl";

/// The folder of a job's credentials. Each scenario is a process of its own, and calls this from one thread.
fn folder(job: &str, digit: char) -> Result<PathBuf, std::io::Error> {
    let name = format!("nccl-credentials-{job}-{digit}-{}", std::process::id());
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join("job"), job)?;
    let secret = folder.join("secret");
    std::fs::write(&secret, digit.to_string().repeat(64))?;
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600))?;
    Ok(folder)
}

fn with(folder: Option<&PathBuf>) -> GroupOptions {
    let mut options = GroupOptions::default();
    if let Some(folder) = folder {
        let folder = folder.to_string_lossy().into_owned();
        options.hints.insert("credentials".into(), folder);
    }
    options
}

fn one_job() -> Outcome {
    let folder = folder("job-7", '1')?;
    two(with(Some(&folder)), |rank, group, _| sum_works(rank, group))
}

fn encrypting(folder: &PathBuf, encrypt: &str) -> GroupOptions {
    let mut options = with(Some(folder));
    options.hints.insert("encrypt".into(), encrypt.into());
    options
}

fn unlike_encryption() -> Outcome {
    let folder = folder("job-7", '1')?;
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    ranks(2, |rank| {
        let limit = [Duration::from_secs(2), SOON][rank as usize];
        let options = encrypting(&folder, ["1", "0"][rank as usize]);
        let e = group(rank, options)?
            .configure(configuration(&store, rank, 2, 1, limit))
            .err()
            .ok_or("they met")?;
        match rank {
            0 => says(&e, ErrorKind::Timeout, &["one of the two encrypts"]),
            _ => says(&e, ErrorKind::Protocol, &["OXCCL_ENCRYPT"]),
        }
    })
}

/// Rank 1 calls through a party that sees all that goes to rank 0 and back, and changes a byte of what it says once `spoil` is raised.
fn between(port: u16, seen: Arc<Mutex<Vec<u8>>>, spoil: Arc<AtomicBool>) -> Result<u16, std::io::Error> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let own = listener.local_addr()?.port();
    std::thread::spawn(move || -> std::io::Result<()> {
        let (caller, _) = listener.accept()?;
        let zero = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        for (to_zero, mut from, mut to) in [
            (true, caller.try_clone()?, zero.try_clone()?),
            (false, zero, caller),
        ] {
            let (seen, spoil) = (seen.clone(), spoil.clone());
            std::thread::spawn(move || -> std::io::Result<()> {
                let mut some = [0; 4096];
                loop {
                    let n = from.read(&mut some)?;
                    if n == 0 {
                        return to.shutdown(Shutdown::Write);
                    }
                    if let Ok(mut seen) = seen.lock() {
                        seen.extend_from_slice(&some[..n]);
                    }
                    if to_zero && spoil.load(Ordering::Acquire) {
                        some[n - 1] ^= 1;
                    }
                    to.write_all(&some[..n])?;
                }
            });
        }
        Ok(())
    });
    Ok(own)
}

fn encrypted() -> Outcome {
    const REASON: &str = "a reason that no other party is to read";
    let folder = &folder("job-7", '1')?;
    for (encrypt, spoils) in [("0", false), ("1", false), ("1", true)] {
        let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        let (seen, spoil) = (Arc::default(), Arc::new(AtomicBool::new(false)));
        ranks(2, |rank| {
            let group = group(rank, encrypting(folder, encrypt))?;
            if rank == 1 {
                let (port, _) = published(&store)?;
                let text = store.get(KEY, deadline_in(SOON))?;
                let through = between(port, Arc::clone(&seen), spoil.clone())?;
                let text =
                    String::from_utf8_lossy(&text).replacen(&format!(" {port} "), &format!(" {through} "), 1);
                store.set(KEY, text.as_bytes(), deadline_in(SOON))?;
            }
            group.configure(configuration(&store, rank, 2, 1, SOON))?;
            sum_works(rank, &group)?;
            // The abort must not overtake rank 0's sum.
            store.barrier("both have the sum", 2, deadline_in(SOON))?;
            if rank == 1 {
                spoil.store(spoils, Ordering::Release);
                group.abort(REASON);
                return Ok(());
            }
            let e = group_error(&group)?;
            match spoils {
                false => says(&e, ErrorKind::Aborted, &[REASON]),
                // Nothing of it is believed, and rank 1 is named.
                true => {
                    check(e.context().peer == Some(1), || format!("no rank is named: {e}"))?;
                    says(&e, ErrorKind::PeerLost, &["does not open"])
                }
            }
        })?;
        let seen = seen.lock().map_err(|_| "a panic")?;
        let found = seen.windows(REASON.len()).any(|bytes| bytes == REASON.as_bytes());
        must(
            found == (encrypt == "0"),
            "the reason is on the wire although it is encrypted, or not although it is not",
        )?;
    }
    Ok(())
}

fn no_trust() -> Outcome {
    let (ours, other) = (folder("job-7", '1')?, folder("job-7", '2')?);
    for (zero, one, words) in [
        (Some(&ours), None, "asks for a job's credentials"),
        (None, Some(&ours), "it has no credentials"),
        (Some(&ours), Some(&other), "does not hold the secret of job job-7"),
    ] {
        let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        ranks(2, |rank| {
            let limit = [Duration::from_secs(2), SOON][rank as usize];
            let options = with([zero, one][rank as usize]);
            let e = group(rank, options)?
                .configure(configuration(&store, rank, 2, 1, limit))
                .err()
                .ok_or("they met")?;
            match rank {
                0 => says(
                    &e,
                    ErrorKind::Timeout,
                    &["rank 1 of 2 did not come", "turned away"],
                ),
                _ => says(&e, ErrorKind::Protocol, &[words]),
            }
        })?;
    }
    Ok(())
}

/// Rank 0's port and token, once it has published them.
fn published(store: &Arc<dyn Store>) -> Result<(u16, Vec<u8>), libtest_mimic::Failed> {
    let by = deadline_in(SOON);
    store.wait(&[KEY], by)?;
    let text = String::from_utf8_lossy(&store.get(KEY, by)?).into_owned();
    let mut fields = text.split(' ').skip(1);
    let token = fields.next().ok_or("no token")?;
    let token = (0..token.len() / 2)
        .map(|i| u8::from_str_radix(&token[2 * i..2 * i + 2], 16))
        .collect::<Result<_, _>>()?;
    Ok((fields.next().ok_or("no port")?.parse()?, token))
}

/// Rank 1's greeting, set up in another way: rank 0 fails with `Mismatch` if it believes it.
fn greeting(token: &[u8]) -> Vec<u8> {
    let mut bytes = b"oxpeers\x00\x01\x00\x00\x00".to_vec();
    bytes.extend(token);
    for word in [1u32, 2] {
        bytes.extend(word.to_le_bytes());
    }
    for word in [1u64, 0xDEAD] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.resize(180, 0);
    bytes
}

fn all_of(mut stream: TcpStream) -> Result<Vec<u8>, std::io::Error> {
    stream.set_read_timeout(Some(SOON))?;
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Err(e) if e.kind() != std::io::ErrorKind::ConnectionReset => Err(e),
        _ => Ok(rest),
    }
}

/// What a rank says in the hello, and its end.
fn say_hello(
    stream: &mut TcpStream,
    folder: &Path,
    topic: Topic,
) -> Result<(Vec<u8>, Option<Reason>), libtest_mimic::Failed> {
    let mut hello = Handshake::call(Credentials::load(folder)?, topic)?;
    let mut said = Vec::new();
    loop {
        said.extend(hello.outgoing());
        stream.write_all(hello.outgoing())?;
        hello.sent(hello.outgoing().len());
        if hello.is_done() {
            return Ok((said, None));
        }
        let n = stream.read(hello.room())?;
        if n == 0 {
            return Err("rank 0 closed without a word".into());
        }
        if let Err(refused) = hello.received(n) {
            stream.write_all(hello.outgoing())?;
            return Ok((said, Some(refused.reason())));
        }
    }
}

fn must(holds: bool, what: &str) -> Outcome {
    check(holds, || what.to_owned())
}

fn strangers() -> Outcome {
    ftcore::raise_descriptor_limit();
    let (ours, other) = (folder("job-7", '1')?, folder("job-7", '2')?);
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let (store, ours) = (&store, &ours);
    std::thread::scope(|scope| {
        let zero = scope.spawn(move || -> Outcome {
            let group = group(0, with(Some(ours)))?;
            group.configure(configuration(store, 0, 2, 1, SOON))?;
            sum_works(0, &group)
        });
        let (port, token) = published(store)?;
        let connect = || TcpStream::connect((Ipv4Addr::LOCALHOST, port));
        // They know the token. No hello: told why, and no more.
        let mut plain = connect()?;
        plain.write_all(&greeting(&token))?;
        let told = all_of(plain)?;
        must(Refused::seen_without_credentials(&told).is_some(), "not told why")?;
        for (folder, topic, expected) in [
            (&other, Topic::new("nccl", Epoch(1), 1, 0), Reason::WrongProof),
            (ours, Topic::new("nccl", Epoch(2), 1, 0), Reason::OtherTopic),
            (ours, Topic::new("gloo", Epoch(1), 1, 0), Reason::OtherTopic),
        ] {
            let mut stream = connect()?;
            let (_, end) = say_hello(&mut stream, folder, topic)?;
            must(end == Some(expected), &format!("{topic:?} ended with {end:?}"))?;
            must(all_of(stream)?.is_empty(), "heard more than a refusal")?;
        }
        let mut stream = connect()?;
        let (recorded, _) = say_hello(&mut stream, ours, Topic::new("nccl", Epoch(1), 1, 0))?;
        let mut replay = connect()?;
        replay.write_all(&recorded)?;
        replay.write_all(&greeting(&token))?;
        must(all_of(replay)?.len() <= 96, "a replay was answered")?;
        let mut as_another = connect()?;
        say_hello(&mut as_another, ours, Topic::new("nccl", Epoch(1), 7, 0))?;
        as_another.write_all(&greeting(&token))?;
        must(all_of(as_another)?.is_empty(), "another rank was answered")?;
        let mut half = Vec::new();
        for i in 0..400 {
            let mut stream = connect()?;
            stream.write_all(&recorded[..i % 79])?;
            half.push(stream);
        }
        must(all_of(half.remove(0))?.is_empty(), "half a hello was answered")?;
        let group = group(1, with(Some(ours)))?;
        group.configure(configuration(store, 1, 2, 1, SOON))?;
        sum_works(1, &group)?;
        drop((half, stream));
        zero.join().map_err(|_| "a panic")?
    })
}

/// Each of them was once waited for, for two seconds.
fn silent() -> Outcome {
    ftcore::raise_descriptor_limit();
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let store = &store;
    std::thread::scope(|scope| {
        let zero = scope.spawn(move || -> Outcome {
            let group = group(0, with(None))?;
            group.configure(configuration(store, 0, 2, 1, SOON))?;
            sum_works(0, &group)
        });
        let (port, _) = published(store)?;
        let silent = (0..40)
            .map(|_| TcpStream::connect((Ipv4Addr::LOCALHOST, port)))
            .collect::<Result<Vec<_>, _>>()?;
        let group = group(1, with(None))?;
        group.configure(configuration(store, 1, 2, 1, SOON))?;
        sum_works(1, &group)?;
        drop(silent);
        zero.join().map_err(|_| "a panic")?
    })
}

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario("meet_with_the_credentials_of_one_job", &[], one_job),
        scenario("meet_only_where_both_encrypt_or_neither", &[], unlike_encryption),
        scenario("encrypt_what_their_control_connections_say", &[], encrypted),
        scenario("meet_a_rank_0_that_does_not_trust_it", &[], no_trust),
        scenario("meet_strangers_that_do_not_prove_the_secret", &[], strangers),
        scenario("meet_many_silent_strangers_at_rank_0_s_port", &[], silent),
    ]
}

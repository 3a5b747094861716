//! Two processes prove to each other who they are, over real sockets; and what those that cannot do.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a failure here is a failed test"
)]

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Credentials, ErrorKind};
use oxccl_identity::{Acceptor, Party, Role};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const TIME_LIMIT: Duration = Duration::from_secs(60);

fn folder(path: &Path, job: &str) -> Arc<Credentials> {
    oxccl_identity::create(path, Some(job)).unwrap();
    Credentials::load(path).unwrap()
}

fn replica(name: &str) -> Role {
    Role::Replica(name.into())
}

fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async { tokio::time::timeout(TIME_LIMIT, test).await.expect("it hangs") })
}

/// A listener that greets those that prove who they are with their names.
async fn serve(parties: &[Arc<Party>], handshakes: usize, limit: Duration) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let acceptor = Arc::new(Acceptor::new(parties, handshakes));
    tokio::spawn(async move {
        while let Ok((stream, from)) = listener.accept().await {
            let acceptor = Arc::clone(&acceptor);
            tokio::spawn(async move {
                let deadline = Instant::now() + limit;
                if let Some((mut stream, peer)) = acceptor.accept(stream, from, deadline, |s| s).await {
                    stream.write_all(peer.to_string().as_bytes()).await.unwrap();
                    stream.shutdown().await.unwrap();
                }
            });
        }
    });
    address
}

/// What the listener calls `party`, or the error of the attempt.
async fn call(address: SocketAddr, party: &Party, expected: Option<&Role>) -> ftcore::Result<String> {
    let stream = TcpStream::connect(address).await.unwrap();
    let mut stream = party.connect(stream, expected).await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    Ok(text)
}

#[test]
fn both_sides_know_each_other_and_a_folder_for_one_replica_is_enough() {
    let dir = tempfile::tempdir().unwrap();
    let job = folder(&dir.path().join("job"), "demo");
    oxccl_identity::issue(job.folder(), "a", &dir.path().join("a")).unwrap();
    let one = Credentials::load(&dir.path().join("a")).unwrap();
    run(async {
        let lighthouse = Party::new(&job, Role::Lighthouse).unwrap();
        let address = serve(&[lighthouse], 16, TIME_LIMIT).await;
        let expected = Some(&Role::Lighthouse);
        for (party, says) in [
            (Party::new(&one, replica("a")), "replica 'a' of job demo"),
            (Party::new(&job, replica("b")), "replica 'b' of job demo"),
            (Party::tool(&one), "replica 'a' of job demo"),
            (Party::tool(&job), "the operator of job demo"),
        ] {
            let party = party.unwrap();
            assert_eq!(call(address, &party, expected).await.unwrap(), says);
            assert_eq!(call(address, &party, None).await.unwrap(), says);
            let e = call(address, &party, Some(&replica("c"))).await.unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Unavailable);
            assert!(
                e.message().contains("proves to be the lighthouse of job demo")
                    && e.message().contains("replica 'c' was called"),
                "{e}"
            );
        }
    });
    for role in [replica("b"), Role::Lighthouse, Role::Operator] {
        let e = Party::new(&one, role).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        assert!(e.message().contains("is that of replica 'a'"), "{e}");
    }
}

#[test]
fn a_folder_for_the_lighthouse_is_enough_to_be_the_lighthouse_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let job = folder(&dir.path().join("job"), "demo");
    oxccl_identity::issue_for_lighthouse(job.folder(), &dir.path().join("lighthouse")).unwrap();
    let one = Credentials::load(&dir.path().join("lighthouse")).unwrap();
    assert!(!one.folder().join("ca.key").exists() && !one.folder().join("operator.key").exists());
    assert!(
        oxccl_identity::show(one.folder())
            .unwrap()
            .may_be
            .contains("the lighthouse, and nothing else")
    );
    run(async {
        let address = serve(&[Party::new(&one, Role::Lighthouse).unwrap()], 16, TIME_LIMIT).await;
        let caller = Party::new(&job, replica("a")).unwrap();
        let said = call(address, &caller, Some(&Role::Lighthouse)).await.unwrap();
        assert_eq!(said, "replica 'a' of job demo");
    });
    for role in [replica("a"), Role::Operator] {
        let e = Party::new(&one, role).unwrap_err();
        assert!(e.message().contains("is that of the lighthouse"), "{e}");
    }
}

#[test]
fn a_certificate_that_was_taken_back_opens_nothing_at_servers_that_run_and_a_new_one_does() {
    let dir = tempfile::tempdir().unwrap();
    let job = folder(&dir.path().join("job"), "demo");
    let of = |name: &str, out: &str| {
        let out = dir.path().join(out);
        oxccl_identity::issue(job.folder(), name, &out).unwrap();
        Party::new(&Credentials::load(&out).unwrap(), replica(name)).unwrap()
    };
    let (a, b) = (of("a", "a"), of("b", "b"));
    let list = job.folder().join("revoked");
    run(async {
        let lighthouse = Party::new(&job, Role::Lighthouse).unwrap();
        let address = serve(&[Arc::clone(&lighthouse)], 16, TIME_LIMIT).await;
        let expected = Some(&Role::Lighthouse);
        call(address, &a, expected).await.unwrap();
        oxccl_identity::revoke(job.folder(), "a").unwrap();
        let e = call(address, &a, expected).await.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unavailable);
        assert!(e.message().contains("CertificateRevoked"), "{e}");
        // One that is made at once is another one, although both tell whole seconds only.
        call(address, &of("a", "again"), expected).await.unwrap();
        // Nor does a member with the list go on with what it serves.
        let served = serve(&[Arc::clone(&a)], 16, TIME_LIMIT).await;
        let e = call(served, &lighthouse, Some(&replica("a"))).await.unwrap_err();
        assert!(e.message().contains("was taken back"), "{e}");
        // Others are as before.
        call(address, &b, expected).await.unwrap();
        // One that was made after the list says it: the list says when.
        let text = std::fs::read_to_string(&list).unwrap();
        let at: u64 = text.strip_prefix("a ").unwrap().trim().parse().unwrap();
        std::fs::write(&list, format!("a {}\n", at - 3600)).unwrap();
        call(address, &a, expected).await.unwrap();
        // Twice, and for another one, too.
        oxccl_identity::revoke(job.folder(), "a").unwrap();
        oxccl_identity::revoke(job.folder(), "b").unwrap();
        assert_eq!(std::fs::read_to_string(&list).unwrap().lines().count(), 2);
        for party in [&a, &b] {
            call(address, party, expected).await.unwrap_err();
        }
        // A list that is none lets no replica in, and the operator all the same.
        std::fs::write(&list, "rubbish").unwrap();
        call(address, &a, expected).await.unwrap_err();
        call(address, &Party::tool(&job).unwrap(), expected)
            .await
            .unwrap();
        std::fs::remove_file(&list).unwrap();
        call(address, &a, expected).await.unwrap();
    });
    let e = oxccl_identity::revoke(job.folder(), "no such/name").unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidArgument);
    assert_eq!(
        oxccl_identity::revoke(dir.path(), "a").unwrap_err().kind(),
        ErrorKind::InvalidArgument
    );
}

#[test]
fn of_certificates_that_are_taken_back_at_once_none_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let job = folder(&dir.path().join("job"), "demo");
    let names: Vec<String> = (0..8).map(|n| format!("replica{n}")).collect();
    std::thread::scope(|scope| {
        for name in &names {
            scope.spawn(|| oxccl_identity::revoke(job.folder(), name).unwrap());
        }
    });
    let text = std::fs::read_to_string(job.folder().join("revoked")).unwrap();
    let mut listed: Vec<&str> = text.lines().filter_map(|l| l.split(' ').next()).collect();
    listed.sort_unstable();
    assert_eq!(listed, names);
}

#[test]
fn another_jobs_member_is_refused_by_both_sides_even_under_the_same_job_id() {
    let dir = tempfile::tempdir().unwrap();
    let job = folder(&dir.path().join("job"), "demo");
    run(async {
        let address = serve(&[Party::new(&job, Role::Lighthouse).unwrap()], 16, TIME_LIMIT).await;
        for (n, id) in ["demo", "other"].into_iter().enumerate() {
            let stranger = folder(&dir.path().join(n.to_string()), id);
            let e = call(address, &Party::tool(&stranger).unwrap(), None)
                .await
                .unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Unavailable);
            assert!(
                e.message()
                    .contains(&format!("the server's certificate is not of job {id}")),
                "{e}"
            );
        }
    });
}

#[test]
fn one_listener_serves_several_jobs_and_keeps_them_apart() {
    let dir = tempfile::tempdir().unwrap();
    let jobs = ["red", "blue"].map(|id| folder(&dir.path().join(id), id));
    run(async {
        let parties = jobs
            .each_ref()
            .map(|job| Party::new(job, Role::Lighthouse).unwrap());
        let address = serve(&parties, 16, TIME_LIMIT).await;
        for job in &jobs {
            let party = Party::new(job, replica("a")).unwrap();
            let said = call(address, &party, Some(&Role::Lighthouse)).await.unwrap();
            assert_eq!(said, format!("replica 'a' of job {}", job.job()));
        }
    });
}

/// A certificate that `ca.key` signs and the house would not make.
fn odd_certificate(job: &Credentials, change: impl FnOnce(&mut rcgen::CertificateParams)) {
    let read = |file: &str| std::fs::read_to_string(job.folder().join(file)).unwrap();
    let mut ca = rcgen::CertificateParams::default();
    ca.distinguished_name
        .push(rcgen::DnType::CommonName, format!("oxccl job {}", job.job()));
    let issuer = rcgen::Issuer::new(ca, rcgen::KeyPair::from_pem(&read("ca.key")).unwrap());
    let mut params = rcgen::CertificateParams::default();
    params.subject_alt_names = vec![
        rcgen::SanType::URI(format!("oxccl://{}/replica/a", job.job()).try_into().unwrap()),
        rcgen::SanType::DnsName(oxccl_identity::server_name(job.job()).try_into().unwrap()),
    ];
    change(&mut params);
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate = params.signed_by(&key, &issuer).unwrap();
    let write = |file: &str, text: String| std::fs::write(job.folder().join(file), text).unwrap();
    write("odd.pem", certificate.pem());
    write("odd.key", key.serialize_pem());
}

/// What the listener does with the certificate in `odd.pem`: an honest TLS client shows it.
async fn show_odd(address: SocketAddr, job: &Credentials) -> Option<String> {
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    let read = |file: &str| std::fs::read(job.folder().join(file)).unwrap();
    let mut roots = rustls::RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_slice(&read("ca.pem")).unwrap())
        .unwrap();
    let config = rustls::ClientConfig::builder()
        .with_root_certificates(roots)
        .with_client_auth_cert(
            vec![CertificateDer::from_pem_slice(&read("odd.pem")).unwrap()],
            PrivateKeyDer::from_pem_slice(&read("odd.key")).unwrap(),
        )
        .unwrap();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let name = oxccl_identity::server_name(job.job()).try_into().unwrap();
    let stream = TcpStream::connect(address).await.unwrap();
    let mut stream = connector.connect(name, stream).await.ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await.ok()?;
    Some(text).filter(|t| !t.is_empty())
}

#[test]
fn an_expired_certificate_and_one_without_a_role_of_the_job_open_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let job = folder(&dir.path().join("job"), "demo");
    run(async {
        let address = serve(&[Party::new(&job, Role::Lighthouse).unwrap()], 16, TIME_LIMIT).await;
        // The control: the same certificate without a fault is accepted.
        odd_certificate(&job, |_| ());
        assert_eq!(
            show_odd(address, &job).await.as_deref(),
            Some("replica 'a' of job demo")
        );
        odd_certificate(&job, |p| {
            p.not_before = rcgen::date_time_ymd(2020, 1, 1);
            p.not_after = rcgen::date_time_ymd(2021, 1, 1);
        });
        assert_eq!(show_odd(address, &job).await, None);
        odd_certificate(&job, |p| p.not_before = rcgen::date_time_ymd(2100, 1, 1));
        assert_eq!(show_odd(address, &job).await, None);
        for uri in ["oxccl://other/replica/a", "oxccl://demo/king", "https://demo"] {
            odd_certificate(&job, |p| {
                p.subject_alt_names[0] = rcgen::SanType::URI(uri.try_into().unwrap());
            });
            assert_eq!(show_odd(address, &job).await, None, "{uri}");
        }
        odd_certificate(&job, |p| {
            let operator = rcgen::SanType::URI("oxccl://demo/operator".try_into().unwrap());
            p.subject_alt_names.push(operator);
        });
        assert_eq!(show_odd(address, &job).await, None, "two roles");
    });
}

#[test]
fn a_caller_without_tls_reads_what_it_lacks() {
    let dir = tempfile::tempdir().unwrap();
    let job = folder(&dir.path().join("job"), "demo");
    run(async {
        let address = serve(&[Party::new(&job, Role::Lighthouse).unwrap()], 16, TIME_LIMIT).await;
        for first in ["GET / HTTP/1.1\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "x"] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(first.as_bytes()).await.unwrap();
            let mut bytes = Vec::new();
            let _ = stream.read_to_end(&mut bytes).await;
            let text = String::from_utf8_lossy(&bytes);
            assert!(
                text.contains("asks for the credentials of job demo"),
                "{first}: {text}"
            );
        }
    });
}

#[test]
fn a_caller_with_credentials_says_that_the_server_has_none() {
    let dir = tempfile::tempdir().unwrap();
    let job = folder(&dir.path().join("job"), "demo");
    run(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
            let _ = stream.read(&mut [0; 1]).await;
        });
        let e = call(address, &Party::tool(&job).unwrap(), None)
            .await
            .unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unavailable);
        assert!(e.message().contains("runs without credentials"), "{e}");
    });
}

#[test]
fn half_handshakes_end_in_time_and_never_keep_a_member_out() {
    let dir = tempfile::tempdir().unwrap();
    let job = folder(&dir.path().join("job"), "demo");
    run(async {
        let lighthouse = Party::new(&job, Role::Lighthouse).unwrap();
        let member = Party::new(&job, replica("a")).unwrap();
        // The time of the strangers is not over before the test is: room must be made.
        let address = serve(&[Arc::clone(&lighthouse)], 8, TIME_LIMIT * 2).await;
        let beginnings: [&[u8]; 4] = [
            b"",
            &[0x16],
            &[0x16, 3, 1, 2, 0],
            &[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3],
        ];
        let mut strangers = Vec::new();
        for n in 0..40 {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(beginnings[n % 4]).await.unwrap();
            strangers.push(stream);
            if n % 8 == 0 {
                let said = call(address, &member, None).await.unwrap();
                assert_eq!(said, "replica 'a' of job demo");
            }
        }
        // All but the newest 8 are gone.
        for mut stream in strangers.drain(..30) {
            assert!(
                !matches!(stream.read(&mut [0; 8]).await, Ok(1..)),
                "no answer is given"
            );
        }
        // And with a deadline all are.
        let address = serve(&[lighthouse], 64, Duration::from_millis(300)).await;
        for beginning in beginnings {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(beginning).await.unwrap();
            assert!(!matches!(stream.read(&mut [0; 8]).await, Ok(1..)));
        }
    });
}

//! Tests of who is let in: a member of the job that speaks as another, and a rank elsewhere that tells an address of its own host's only.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ftcore::identity::hello::{Handshake, Topic};
use ftcore::{Credentials, Epoch, ErrorKind, GroupOptions, InMemoryStore, ProcessGroup, Store, deadline_in};

use crate::GlooGroup;
use crate::bad_peer::{Published, configuration, hello};
use crate::wire::{Hello, Purpose};

/// A job's credentials on disk, of this test.
struct Job(PathBuf);

impl Job {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("oxccl-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("job"), "job-7").unwrap();
        let secret = folder.join("secret");
        std::fs::write(&secret, "1".repeat(64)).unwrap();
        std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
        Self(folder)
    }

    fn group(&self) -> GlooGroup {
        let mut options = GroupOptions::default();
        let folder = self.0.to_str().unwrap().to_owned();
        options.hints.insert("credentials".into(), folder);
        options.hints.insert("transport".into(), "tcp".into());
        GlooGroup::new("bad", options).unwrap()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_member_of_the_job_cannot_speak_as_another() {
    let job = Job::new("speaks-as-another");
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    std::thread::scope(|scope| {
        let ours = scope.spawn(|| job.group().configure(configuration(&store, 1, 0, 2)));
        let published = Published::of_rank_0(&store);
        // It proves itself as rank 9 and says that it is rank 1, of a build with other constants: believed, those would end rank 0.
        let mut other = published.dial();
        let topic = Topic::new("gloo", Epoch(1), 9, 0);
        let mut handshake = Handshake::call(Credentials::load(&job.0).unwrap(), topic).unwrap();
        assert!(handshake.advance(&mut other).unwrap());
        let greeting = Hello {
            constants: 0xDEAD,
            ..hello(Purpose::Control, published.nonce)
        };
        other.write_all(&greeting.encode()).unwrap();
        // No answer, and the connection ends.
        assert!(matches!(other.read(&mut [0; 1]), Ok(0) | Err(_)));
        job.group().configure(configuration(&store, 1, 1, 2)).unwrap();
        ours.join().unwrap().unwrap();
    });
}

#[test]
fn a_rank_elsewhere_that_tells_a_loopback_address_is_told_what_helps() {
    let job = Job::new("tells-loopback");
    for (group, says, says_not) in [
        (job.group(), "OXCCL_GLOO_HOST", "no credentials"),
        (
            GlooGroup::new("bad", GroupOptions::default()).unwrap(),
            "no credentials",
            "OXCCL_GLOO_HOST",
        ),
    ] {
        let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        let card = "oxccl-gloo 0123456789abcdef another-host 127.0.1.1:4103 - - 0000000000000001";
        store
            .set(
                "bad/1/gloo/0",
                card.as_bytes(),
                deadline_in(Duration::from_secs(1)),
            )
            .unwrap();
        let error = group.configure(configuration(&store, 1, 1, 2)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        let text = error.to_string();
        assert!(text.contains(says) && !text.contains(says_not), "{text}");
    }
}

//! What the manager server is told of a rank between its calls.

use std::sync::{Mutex, OnceLock};

use backend_gloo::GlooGroup;
use checkpoint::StateDict;
use coordination::{LighthouseConfig, LighthouseServer};
use ftcore::{Checked, Completion, Configuration, Failed, GroupOptions, Rejected, Work, Wrapper};

use super::*;

fn soon() -> Instant {
    deadline_in(Duration::from_secs(60))
}

/// Notes how often the training thread has shown progress, each time that it gets here.
#[derive(Clone, Default)]
struct Notes {
    progress: Arc<OnceLock<Arc<AtomicU64>>>,
    noted: Arc<Mutex<Vec<(&'static str, u64)>>>,
}

impl Notes {
    fn note(&self, at: &'static str) {
        let shown = self.progress.get().unwrap().load(Ordering::Relaxed);
        self.noted.lock().unwrap().push((at, shown));
    }
}

struct Group(GlooGroup, Notes);

impl Wrapper for Group {
    fn inner(&self) -> &dyn ProcessGroup {
        &self.0
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        self.1.note("connects");
        self.0.configure(configuration)
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        self.0.submit(op, options)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        self.0.execute(op, options)
    }

    fn split(&self, _: Option<u32>, _: u32, _: Instant) -> Result<Option<Box<dyn ProcessGroup>>> {
        Ok(None)
    }
}

struct Noting(Notes);

impl State for Noting {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        self.0.note("offers");
        out.insert_f32("value", &[1], &[0.0])
    }

    fn load(&mut self, _: &StateDict) -> Result<()> {
        self.0.note("loads");
        Ok(())
    }
}

/// A replica that took each part of an attempt for no longer than its limit was put out, because the whole took longer than `progress_timeout`.
#[test]
fn each_part_of_coming_up_is_progress() {
    let lighthouse = LighthouseServer::start(LighthouseConfig {
        bind: "127.0.0.1:0".into(),
        initial_replicas: Some(2),
        ..LighthouseConfig::default()
    })
    .unwrap();
    let comes_up = |name: &str| {
        let notes = Notes::default();
        let group = Group(
            GlooGroup::new(name, GroupOptions::default()).unwrap(),
            notes.clone(),
        );
        let config = ManagerConfig::new(name, lighthouse.address());
        let mut manager = Manager::new(Arc::new(group), config).unwrap();
        notes.progress.set(manager.progress.clone()).unwrap();
        manager.start_quorum(&mut Noting(notes.clone()), soon()).unwrap();
        notes.note("is up");
        (manager, notes)
    };
    // The second one takes over the state of the first one, which stays for that long.
    let both = std::thread::scope(|scope| {
        let [first, second] = ["r0", "r1"].map(|name| scope.spawn(move || comes_up(name)));
        [first, second].map(|manager| manager.join().unwrap())
    });
    for ((_, notes), parts) in both
        .iter()
        .zip([["offers", "connects", "is up"], ["connects", "loads", "is up"]])
    {
        let noted = notes.noted.lock().unwrap();
        assert_eq!(noted.iter().map(|(at, _)| *at).collect::<Vec<_>>(), parts);
        assert!(noted.is_sorted_by(|(_, a), (_, b)| a < b), "{noted:?}");
        let [_, (at, shown), _] = noted[..] else {
            panic!("{noted:?}")
        };
        // The state is fetched between the two.
        assert!(at != "loads" || shown >= noted[0].1 + 2, "{noted:?}");
    }
}

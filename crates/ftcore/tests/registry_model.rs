//! A model of races in the registry: shuttle runs the real code under thousands of schedules, random ones and ones that
//! give way at unlikely places.
//!
//! `cargo test -p ftcore --features shuttle --test registry_model`

use std::sync::Arc;

use ftcore::registry::{Backend, BackendFactory, OnConflict, Outcome, Provenance, Source};
use ftcore::{
    Capabilities, DTypeSet, Device, DeviceKind, Error, FeatureSet, GroupOptions, OpSet, ProcessGroup,
    ReduceOp, Registry, Result,
};
use shuttle::thread;

const SCHEDULES: usize = 3_000;

struct Nothing;

impl BackendFactory for Nothing {
    fn probe(&self) -> Result<()> {
        Err(Error::unsupported("a model"))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            ops: OpSet::NONE,
            moves: DTypeSet::NONE,
            reduces: [DTypeSet::NONE; ReduceOp::COUNT],
            features: FeatureSet::NONE,
            options: Vec::new(),
            devices: Vec::new(),
            notes: Vec::new(),
        }
    }

    fn create(&self, _: &Device, _: &GroupOptions) -> Result<Box<dyn ProcessGroup>> {
        Err(Error::unsupported("a model"))
    }
}

fn backend(provenance: Provenance, origin: &str) -> Backend {
    Backend {
        name: "one".into(),
        device: DeviceKind::Cpu,
        source: Source {
            provenance,
            origin: origin.into(),
            version: "1".into(),
        },
        factory: Arc::new(Nothing),
    }
}

fn under_every_schedule(model: fn()) {
    shuttle::check_random(model, SCHEDULES);
    shuttle::check_pct(model, SCHEDULES, 3);
}

#[test]
fn whoever_looks_while_others_register_sees_providers_get_stronger_and_never_go() {
    under_every_schedule(|| {
        let registry = Arc::new(Registry::new());
        let all = [
            (Provenance::BuiltIn, "a"),
            (Provenance::Plugin, "b"),
            (Provenance::Plugin, "c"),
            (Provenance::Api, "d"),
        ];
        let writers: Vec<_> = all
            .into_iter()
            .map(|(provenance, origin)| {
                let registry = registry.clone();
                thread::spawn(move || {
                    registry
                        .register(backend(provenance, origin), OnConflict::Keep)
                        .unwrap()
                })
            })
            .collect();
        let reader = {
            let registry = registry.clone();
            thread::spawn(move || {
                let mut last: Option<Source> = None;
                for _ in 0..4 {
                    let seen = registry.get("one", None).ok().map(|b| b.source);
                    if let (Some(before), now) = (&last, &seen) {
                        let now = now.as_ref().expect("a backend does not go away");
                        assert!(
                            now == before || now.provenance > before.provenance,
                            "{before} then {now}"
                        );
                    }
                    last = seen.or(last);
                }
            })
        };
        let outcomes: Vec<Outcome> = writers.into_iter().map(|w| w.join().unwrap()).collect();
        reader.join().unwrap();
        assert_eq!(registry.get("one", None).unwrap().source.origin, "d");
        let free = outcomes.iter().filter(|o| **o == Outcome::Registered).count();
        assert_eq!(free, 1, "{outcomes:?}");
        // Each of the others lost or won against another one, once.
        assert_eq!(
            registry.conflicts().len(),
            all.len() - 1,
            "{:?}",
            registry.conflicts()
        );
    });
}

#[test]
fn strict_registrations_of_one_key_leave_exactly_one_and_no_trace_of_the_others() {
    under_every_schedule(|| {
        let registry = Arc::new(Registry::new());
        let writers: Vec<_> = ["a", "b", "c"]
            .into_iter()
            .map(|origin| {
                let registry = registry.clone();
                thread::spawn(move || {
                    registry
                        .register(backend(Provenance::Plugin, origin), OnConflict::Strict)
                        .is_ok()
                })
            })
            .collect();
        let won = writers
            .into_iter()
            .map(|w| w.join().unwrap())
            .filter(|ok| *ok)
            .count();
        assert_eq!(won, 1);
        assert!(registry.conflicts().is_empty());
        assert_eq!(registry.list().len(), 1);
    });
}

#[test]
fn the_same_provider_twice_at_once_is_one() {
    under_every_schedule(|| {
        let registry = Arc::new(Registry::new());
        let writers: Vec<_> = (0..3)
            .map(|_| {
                let registry = registry.clone();
                thread::spawn(move || {
                    registry
                        .register(backend(Provenance::Plugin, "a"), OnConflict::Strict)
                        .unwrap()
                })
            })
            .collect();
        let outcomes: Vec<Outcome> = writers.into_iter().map(|w| w.join().unwrap()).collect();
        let registered = outcomes.iter().filter(|o| **o == Outcome::Registered).count();
        assert_eq!(registered, 1);
        assert!(registry.conflicts().is_empty());
    });
}

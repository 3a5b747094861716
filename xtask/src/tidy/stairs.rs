//! The rule of the stairs: a crate depends only on lower floors, and heavy dependencies stay in their rooms.
//!
//! Reads the declared dependencies from `cargo metadata`, so a feature that is off counts too.

use super::Finding;
use crate::metadata::{Metadata, Package};

/// Where a crate of ours stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Floor(u8),
    /// Around the house: may use any floor, and no floor may use it except in tests.
    Around,
}

/// The floors by package name. Names that end or begin in a way common to a room are in [`place`].
const FLOORS: &[(&str, Place)] = &[
    ("ftcore", Place::Floor(0)),
    ("oxccl-plugin", Place::Floor(1)),
    ("oxccl-vendor", Place::Floor(1)),
    ("oxccl-world", Place::Floor(3)),
    ("oxccl-quant", Place::Floor(3)),
    ("oxccl-quant-cuda", Place::Floor(3)),
    ("oxccl-isolate", Place::Floor(3)),
    ("oxccl-manager", Place::Floor(4)),
    ("oxccl-checkpoint", Place::Floor(4)),
    ("oxccl-coordination", Place::Floor(4)),
    ("oxccl-protocol", Place::Floor(4)),
    ("oxccl-identity", Place::Floor(4)),
    ("oxccl-replica", Place::Floor(4)),
    ("oxccl-ddp", Place::Floor(5)),
    ("oxccl-diloco", Place::Floor(5)),
    ("oxccl-candle", Place::Floor(5)),
    ("oxccl-fleet", Place::Floor(5)),
    // `oxccl conformance` runs it; otherwise it is for tests.
    ("oxccl-conformance", Place::Floor(5)),
    ("oxccl", Place::Floor(6)),
    // Programs, on top of the facade.
    ("oxccl-launch", Place::Floor(7)),
    ("oxccl-plot", Place::Floor(7)),
    ("oxccl-cli", Place::Floor(8)),
    ("documents", Place::Around),
    ("gloo-plugin", Place::Around),
    ("loopback", Place::Around),
    ("nccl-standin", Place::Around),
    ("odd-plugin", Place::Around),
    ("oxccl-examples", Place::Around),
    ("oxccl-tests", Place::Around),
    ("training-rig", Place::Around),
    ("xtask", Place::Around),
];

/// Steps within one floor that the design asks for.
const WITHIN: &[(&str, &[&str])] = &[
    ("nccl-sys", &["oxccl-vendor"]),
    ("oneccl-sys", &["oxccl-vendor"]),
    ("sycl-sys", &["oxccl-vendor"]),
    ("oxccl-plugin", &["oxccl-vendor"]),
    ("oxccl-quant-cuda", &["oxccl-quant"]),
    ("oxccl-coordination", &["oxccl-protocol", "oxccl-identity"]),
    ("oxccl-checkpoint", &["oxccl-identity", "oxccl-replica"]),
    (
        "oxccl-manager",
        &[
            "oxccl-protocol",
            "oxccl-identity",
            "oxccl-coordination",
            "oxccl-checkpoint",
            "oxccl-replica",
        ],
    ),
    ("oxccl-candle", &["oxccl-ddp", "oxccl-diloco"]),
];

/// What a crate must not need at all, by itself or through others: with these, a training loop would bring a server.
const WITHOUT: &[(&str, &[&str])] = &[
    ("oxccl-ddp", SERVERS),
    ("oxccl-diloco", SERVERS),
    ("oxccl-replica", SERVERS),
    ("oxccl-protocol", SERVERS),
];

const SERVERS: &[&str] = &[
    "oxccl-manager",
    "oxccl-coordination",
    "oxccl-checkpoint",
    "oxccl-identity",
];

/// Dependencies that only some crates may have (tests may use them anywhere).
struct Fenced {
    /// The dependency's name is this, or begins with it and `-`.
    names: &'static [&'static str],
    allowed: &'static [&'static str],
    why: &'static str,
}

const FENCES: &[Fenced] = &[
    Fenced {
        names: &["tokio", "tonic", "axum", "hyper"],
        allowed: &[
            "oxccl-coordination",
            "oxccl-manager",
            "oxccl-checkpoint",
            "oxccl-identity",
            "oxccl",
            "oxccl-examples",
            "oxccl-tests",
        ],
        why: "async runtimes stay in the control plane; the data plane has its own threads",
    },
    Fenced {
        names: &["candle"],
        allowed: &["oxccl-candle", "oxccl-examples", "oxccl-tests"],
        why: "frameworks stay out of the libraries",
    },
    Fenced {
        names: &["cudarc"],
        allowed: &["backend-nccl", "oxccl-candle"],
        why: "CUDA stays in its backend and the adapters",
    },
];

fn place(name: &str) -> Option<Place> {
    if let Some((_, place)) = FLOORS.iter().find(|(n, _)| *n == name) {
        return Some(*place);
    }
    if name.ends_with("-sys") {
        return Some(Place::Floor(1));
    }
    name.starts_with("backend-").then_some(Place::Floor(2))
}

/// Checks every member's declared dependencies.
pub(super) fn check(metadata: &Metadata) -> Vec<Finding> {
    let members: Vec<&str> = metadata.packages.iter().map(|p| p.name.as_str()).collect();
    let mut findings = Vec::new();
    for package in &metadata.packages {
        let manifest = super::relative(&metadata.workspace_root, &package.manifest_path);
        let mut texts = check_package(package, &members);
        texts.extend(check_without(&metadata.packages, package));
        findings.extend(
            texts
                .into_iter()
                .map(|text| Finding::new(&manifest, 0, "stairs", text)),
        );
    }
    findings
}

/// The ways from `package` to what it must not need: `a -> b -> c`.
fn check_without(packages: &[Package], package: &Package) -> Vec<String> {
    let Some((name, banned)) = WITHOUT.iter().find(|(name, _)| *name == package.name) else {
        return Vec::new();
    };
    let mut ways: Vec<Vec<&str>> = vec![vec![name]];
    let mut seen = vec![*name];
    let mut texts = Vec::new();
    while let Some(way) = ways.pop() {
        let Some(from) = packages
            .iter()
            .find(|p| Some(p.name.as_str()) == way.last().copied())
        else {
            continue;
        };
        let needed = from
            .dependencies
            .iter()
            .filter(|d| d.kind.as_deref() != Some("dev"));
        for to in needed.map(|d| d.name.as_str()) {
            if seen.contains(&to) {
                continue;
            }
            seen.push(to);
            let mut longer = way.clone();
            longer.push(to);
            if banned.contains(&to) {
                texts.push(format!("{name} must do without {to}: {}", longer.join(" -> ")));
            }
            ways.push(longer);
        }
    }
    texts
}

fn check_package(package: &Package, members: &[&str]) -> Vec<String> {
    let name = package.name.as_str();
    let Some(own) = place(name) else {
        return vec![format!(
            "{name} has no floor: give it one in FLOORS (xtask/src/tidy/stairs.rs)"
        )];
    };
    let mut texts = Vec::new();
    for dependency in &package.dependencies {
        let target = dependency.name.as_str();
        let is_dev = dependency.kind.as_deref() == Some("dev");
        if members.contains(&target) {
            if let Some(there) = place(target)
                && !may_use(name, own, target, there, is_dev)
            {
                texts.push(format!(
                    "{name} ({}) must not depend on {target} ({})",
                    show(own),
                    show(there)
                ));
            }
            // A registry would take it for whatever crate of that name it has.
            if matches!((own, place(target)), (Place::Floor(_), Some(Place::Around))) && dependency.req != "*"
            {
                texts.push(format!(
                    "{name} must name {target}, which is not published, without a version"
                ));
            }
            continue;
        }
        for fence in FENCES {
            let is_fenced = fence.names.iter().any(|n| {
                target
                    .strip_prefix(n)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
            });
            if is_fenced
                && !is_dev
                && dependency.kind.as_deref() != Some("build")
                && !fence.allowed.contains(&name)
            {
                texts.push(format!(
                    "{name} must not depend on {target}: {} (allowed in {})",
                    fence.why,
                    fence.allowed.join(", ")
                ));
            }
        }
    }
    texts
}

fn may_use(name: &str, own: Place, target: &str, there: Place, is_dev: bool) -> bool {
    match (own, there) {
        (Place::Around, _) => true,
        (Place::Floor(_), Place::Around) => is_dev,
        (Place::Floor(from), Place::Floor(to)) => {
            to < from
                // Tests may stand on any floor; those of the core must show that it needs none.
                || is_dev && from > 0
                || WITHIN
                    .iter()
                    .any(|(n, targets)| *n == name && targets.contains(&target))
        }
    }
}

fn show(place: Place) -> String {
    match place {
        Place::Floor(n) => format!("floor {n}"),
        Place::Around => "around the house".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::Dependency;

    const MEMBERS: &[&str] = &[
        "ftcore",
        "backend-gloo",
        "oxccl-coordination",
        "oxccl-checkpoint",
        "oxccl-manager",
        "oxccl-diloco",
        "oxccl-conformance",
        "oxccl",
        "documents",
    ];

    fn dependency(name: &str, kind: Option<&str>) -> Dependency {
        Dependency {
            name: name.to_owned(),
            req: "*".to_owned(),
            kind: kind.map(str::to_owned),
        }
    }

    fn package(name: &str, dependencies: &[(&str, Option<&str>)]) -> Package {
        Package {
            name: name.to_owned(),
            manifest_path: "Cargo.toml".into(),
            dependencies: dependencies
                .iter()
                .map(|(name, kind)| dependency(name, *kind))
                .collect(),
            targets: Vec::new(),
            features: Default::default(),
            publish: None,
        }
    }

    fn findings(name: &str, dependencies: &[(&str, Option<&str>)]) -> Vec<String> {
        check_package(&package(name, dependencies), MEMBERS)
    }

    #[test]
    fn training_needs_no_server_not_even_through_another_crate() {
        let ways = |through: Option<&str>, kind: Option<&str>| {
            let mut packages = vec![
                package("oxccl-ddp", &[("oxccl-quant", None)]),
                package("oxccl-quant", &[("ftcore", None)]),
            ];
            packages[1]
                .dependencies
                .extend(through.map(|name| dependency(name, kind)));
            check_without(&packages, &packages[0])
        };
        assert_eq!(
            ways(Some("oxccl-manager"), None),
            ["oxccl-ddp must do without oxccl-manager: oxccl-ddp -> oxccl-quant -> oxccl-manager"]
        );
        assert!(ways(None, None).is_empty());
        assert!(ways(Some("oxccl-manager"), Some("dev")).is_empty());
    }

    #[test]
    fn a_crate_may_use_lower_floors_only() {
        assert!(findings("backend-gloo", &[("ftcore", None)]).is_empty());
        let up = findings("ftcore", &[("backend-gloo", None)]);
        assert_eq!(up, ["ftcore (floor 0) must not depend on backend-gloo (floor 2)"]);
        assert_eq!(findings("ftcore", &[("backend-gloo", Some("build"))]).len(), 1);
        assert_eq!(findings("ftcore", &[("backend-gloo", Some("dev"))]).len(), 1);
    }

    #[test]
    fn steps_within_a_floor_are_the_named_ones() {
        assert!(
            findings(
                "oxccl-manager",
                &[("oxccl-coordination", None), ("oxccl-checkpoint", None)]
            )
            .is_empty()
        );
        assert_eq!(
            findings("oxccl-coordination", &[("oxccl-manager", None)]).len(),
            1
        );
        assert_eq!(
            findings("oxccl-checkpoint", &[("oxccl-coordination", None)]).len(),
            1
        );
        assert!(findings("oxccl-candle", &[("oxccl-diloco", None)]).is_empty());
        assert_eq!(
            findings("oxccl-diloco", &[("oxccl-candle", None)]).len(),
            0,
            "not a member in this test"
        );
    }

    #[test]
    fn what_stands_around_the_house_is_for_tests_only() {
        assert!(findings("backend-gloo", &[("oxccl-conformance", Some("dev"))]).is_empty());
        assert_eq!(findings("backend-gloo", &[("oxccl-conformance", None)]).len(), 1);
        assert!(findings("oxccl", &[("oxccl-conformance", None)]).is_empty());
        assert!(findings("oxccl-tests", &[("oxccl", None), ("oxccl-conformance", None)]).is_empty());
    }

    #[test]
    fn what_is_not_published_has_no_version() {
        let mut cli = package("oxccl-cli", &[("documents", Some("dev"))]);
        assert!(check_package(&cli, MEMBERS).is_empty());
        cli.dependencies[0].req = "^0.1.0".to_owned();
        let texts = check_package(&cli, MEMBERS);
        assert_eq!(
            texts,
            ["oxccl-cli must name documents, which is not published, without a version"]
        );
        cli.name = "xtask".to_owned();
        assert!(check_package(&cli, MEMBERS).is_empty());
    }

    #[test]
    fn a_crate_without_a_floor_is_told_so() {
        assert!(
            findings("newcomer", &[])
                .first()
                .unwrap()
                .contains("has no floor")
        );
        assert!(findings("backend-xccl", &[]).is_empty() && findings("nccl-sys", &[]).is_empty());
    }

    #[test]
    fn heavy_dependencies_stay_in_their_rooms() {
        assert_eq!(findings("ftcore", &[("tokio", None)]).len(), 1);
        assert_eq!(findings("oxccl-ddp", &[("tonic-prost", None)]).len(), 1);
        assert!(findings("ftcore", &[("tokio", Some("dev")), ("tokenizers", None)]).is_empty());
        assert!(findings("oxccl-coordination", &[("tokio", None), ("tonic", None)]).is_empty());
        assert_eq!(findings("oxccl-diloco", &[("candle-core", None)]).len(), 1);
        assert_eq!(findings("ftcore", &[("cudarc", None)]).len(), 1);
    }
}

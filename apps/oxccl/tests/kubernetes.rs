//! The commands for Kubernetes that the documents and the manifests give, run by the real kubectl against a real API server over a real etcd. There
//! are no nodes, so no pod starts: what is tested is that the commands run as they stand, that the server takes what is in `deploy/kubernetes`, and
//! that all that those pods mount is there, with credentials that `oxccl` accepts.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a failure here is a failed test"
)]

use std::fs::Permissions;
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use cluster::{Cluster, Process, wait_until};
use documents::{documented, root};

#[path = "etcd/cluster.rs"]
#[allow(dead_code, reason = "this test needs no lighthouses and kills no members")]
mod cluster;

/// An API server, and a folder in which commands are run as in a clone.
struct Kubernetes {
    folder: TempDir,
    _server: Process,
    _etcd: Cluster,
}

impl Kubernetes {
    fn start() -> Self {
        let etcd = Cluster::start();
        let folder = tempfile::tempdir().unwrap();
        let here = |name: &str| folder.path().join(name);
        symlink(root().join("deploy").canonicalize().unwrap(), here("deploy")).unwrap();
        let port = {
            let held = TcpListener::bind("127.0.0.1:0").unwrap();
            held.local_addr().unwrap().port()
        };
        let members = etcd.addresses().replace(',', ",http://");
        std::fs::write(here("tokens"), "token,admin,admin,system:masters\n").unwrap();
        let config = format!(
            r#"{{"apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{{"name": "c", "cluster": {{"server": "https://127.0.0.1:{port}", "insecure-skip-tls-verify": true}}}}],
            "users": [{{"name": "c", "user": {{"token": "token"}}}}],
            "contexts": [{{"name": "c", "context": {{"cluster": "c", "user": "c"}}}}]}}"#
        );
        std::fs::write(here("config"), config).unwrap();
        // The server wants a key for the tokens of service accounts.
        let key = here("key").display().to_string();
        let made = Command::new("openssl")
            .args([
                "ecparam",
                "-name",
                "prime256v1",
                "-genkey",
                "-noout",
                "-out",
                &key,
            ])
            .output();
        assert!(made.expect("openssl, to make a key").status.success());
        let mut server = Command::new(assets().join("kube-apiserver"));
        server
            .args([
                "--bind-address=127.0.0.1",
                "--service-cluster-ip-range=10.0.0.0/24",
            ])
            .args([
                "--authorization-mode=RBAC",
                "--disable-admission-plugins=ServiceAccount",
            ])
            .arg(format!("--secure-port={port}"))
            .arg(format!("--etcd-servers=http://{members}"))
            .arg(format!("--cert-dir={}", here("certificates").display()))
            .arg(format!("--token-auth-file={}", here("tokens").display()))
            .arg(format!("--service-account-issuer=https://127.0.0.1:{port}"))
            .arg(format!("--service-account-key-file={key}"))
            .arg(format!("--service-account-signing-key-file={key}"));
        let kubernetes = Self {
            _server: Process::start(&mut server),
            _etcd: etcd,
            folder,
        };
        wait_until("the API server is ready", || {
            let is_well = |script| kubernetes.output(script).status.success();
            (is_well("kubectl get --raw /readyz") && is_well("kubectl get namespace default")).then_some(())
        });
        kubernetes
    }

    fn output(&self, script: &str) -> Output {
        let ours = Path::new(env!("CARGO_BIN_EXE_oxccl")).parent().unwrap();
        let path = std::env::var("PATH").unwrap();
        Command::new("timeout")
            .args(["60", "sh", "-c", script])
            .current_dir(self.folder.path())
            .env(
                "PATH",
                format!("{}:{}:{path}", ours.display(), assets().display()),
            )
            .env("KUBECONFIG", self.folder.path().join("config"))
            .env("HOME", self.folder.path())
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }

    /// What a command prints that has to succeed.
    fn run(&self, script: &str) -> String {
        let output = self.output(script);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{script}: {error}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// A namespace of its own for what follows.
    fn enter(&self, namespace: &str) {
        self.run(&format!("kubectl create namespace {namespace}"));
        self.run(&format!(
            "kubectl config set-context --current --namespace={namespace}"
        ));
        self.run("rm -rf job1 job1-*");
    }

    /// All objects of the manifests are there, and what their pods mount.
    fn has_all_that_its_pods_need(&self) {
        let objects: Value =
            serde_json::from_str(&self.run("kubectl get -f deploy/kubernetes -o json")).unwrap();
        let secrets = named(&objects, "secretName");
        assert_eq!(secrets, ["oxccl-lighthouse", "oxccl-job"]);
        for secret in secrets {
            let held: Value =
                serde_json::from_str(&self.run(&format!("kubectl get secret {secret} -o json"))).unwrap();
            let mounted = self.folder.path().join(format!("job1-{secret}"));
            std::fs::create_dir(&mounted).unwrap();
            for key in held["data"].as_object().unwrap().keys() {
                let template = format!(r#"{{{{index .data "{key}" | base64decode}}}}"#);
                let text = self.run(&format!(
                    "kubectl get secret {secret} -o go-template='{template}'"
                ));
                std::fs::write(mounted.join(key), text).unwrap();
                // As the manifests mount it.
                std::fs::set_permissions(mounted.join(key), Permissions::from_mode(0o400)).unwrap();
            }
            self.run(&format!("oxccl credentials show {}", mounted.display()));
        }
        let claims = named(&objects, "claimName");
        assert_eq!(claims, ["oxccl-lighthouse"]);
        self.run("kubectl get persistentvolumeclaim oxccl-lighthouse");
    }
}

/// Where `kube-apiserver` and `kubectl` are.
fn assets() -> PathBuf {
    let folder = std::env::var_os("KUBEBUILDER_ASSETS");
    folder
        .expect("KUBEBUILDER_ASSETS: a folder with kube-apiserver and kubectl")
        .into()
}

/// The texts under `name`, anywhere in `value`, in their order.
fn named<'a>(value: &'a Value, name: &str) -> Vec<&'a str> {
    match value {
        Value::Array(items) => items.iter().flat_map(|item| named(item, name)).collect(),
        Value::Object(fields) => {
            let of = |(key, value): (&'a String, &'a Value)| match value.as_str() {
                Some(text) if key == name => vec![text],
                _ => named(value, name),
            };
            fields.iter().flat_map(of).collect()
        }
        _ => Vec::new(),
    }
}

#[test]
fn the_commands_for_kubernetes_make_all_that_the_pods_need() {
    let kubernetes = Kubernetes::start();
    let read = |file: &str| std::fs::read_to_string(root().join(file)).unwrap();

    kubernetes.enter("launchers");
    let mut ran = 0;
    for command in documented(&read("docs/launchers.md")) {
        let words = command.words.join(" ");
        if command.is_whole && (words.starts_with("kubectl ") || words.starts_with("oxccl credentials ")) {
            kubernetes.run(&words);
            ran += usize::from(words.starts_with("kubectl "));
        }
    }
    assert_eq!(ran, 3);
    kubernetes.has_all_that_its_pods_need();

    kubernetes.enter("manifests");
    for file in [
        "deploy/kubernetes/lighthouse.yaml",
        "deploy/kubernetes/replicas.yaml",
    ] {
        let text = read(file);
        let commands: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("#   "))
            .collect();
        assert!(commands.len() > 1, "{file}: {commands:?}");
        for command in commands {
            kubernetes.run(command);
        }
        kubernetes.run(&format!("kubectl apply -f {file}"));
    }
    kubernetes.has_all_that_its_pods_need();
}

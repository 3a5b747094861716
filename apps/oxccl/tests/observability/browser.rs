//! A headless Chromium, driven by chromedriver over plain HTTP (the W3C's WebDriver, and DevTools where that has no word for it).

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::http::{request, wait_until};

/// WebDriver's key of an element in an answer.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

pub(crate) struct Browser {
    driver: Child,
    session: String,
    _profile: TempDir,
}

/// A port that was free a moment ago.
pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

impl Browser {
    /// A window of 1100 by 1000 that reaches this host only.
    pub(crate) fn start() -> Self {
        let port = free_port();
        let driver = Command::new("chromedriver")
            .arg(format!("--port={port}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("chromedriver: the row `observability` installs it");
        let profile = tempfile::tempdir().unwrap();
        let mut browser = Self {
            driver,
            session: String::new(),
            _profile: profile,
        };
        let url = format!("http://127.0.0.1:{port}");
        wait_until("chromedriver answers", || {
            let (status, _) = request("GET", &format!("{url}/status"), None).ok()?;
            (status == 200).then_some(())
        });
        let arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--window-size=1100,1000",
            // Without a network: nothing but this host has a name or an address.
            "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
            &format!("--user-data-dir={}", browser._profile.path().display()),
        ];
        let wanted = json!({"capabilities": {"alwaysMatch": {"goog:chromeOptions": {"args": arguments}}}});
        let (_, answer) = request("POST", &format!("{url}/session"), Some(&wanted)).unwrap();
        let answer: Value = serde_json::from_str(&answer).unwrap();
        let id = answer["value"]["sessionId"].as_str();
        let id = id.unwrap_or_else(|| panic!("no browser: {answer}"));
        browser.session = format!("{url}/session/{id}");
        browser
    }

    fn call(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = request("POST", &format!("{}/{path}", self.session), Some(body)).unwrap();
        assert_eq!(status, 200, "{path}: {answer}");
        let mut answer: Value = serde_json::from_str(&answer).unwrap();
        answer["value"].take()
    }

    pub(crate) fn open(&self, url: &str) {
        self.call("url", &json!({ "url": url }));
    }

    /// What the script `return`s.
    pub(crate) fn run(&self, script: &str) -> Value {
        self.call("execute/sync", &json!({"script": script, "args": []}))
    }

    /// The text of the element, as a reader sees it.
    pub(crate) fn text(&self, selector: &str) -> String {
        let text = self.run(&format!(
            "return document.querySelector({selector:?})?.innerText ?? ''"
        ));
        text.as_str().unwrap_or_default().to_string()
    }

    /// Clicks where a user would.
    pub(crate) fn click(&self, selector: &str) {
        let found = self.call("element", &json!({"using": "css selector", "value": selector}));
        let id = found[ELEMENT].as_str().unwrap();
        self.call(&format!("element/{id}/click"), &json!({}));
    }

    /// Waits until the script gives true.
    pub(crate) fn wait(&self, what: &str, script: &str) {
        let is_true = || (self.run(script) == Value::Bool(true)).then_some(());
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| wait_until(what, is_true)));
        if done.is_err() {
            panic!("{what}: never; the page says\n{}", self.text("body"));
        }
    }

    /// As a screen of that width, in that colour scheme.
    pub(crate) fn screen(&self, width: u32, height: u32, scheme: &str) {
        let command = |name: &str, parameters: Value| {
            self.call("goog/cdp/execute", &json!({"cmd": name, "params": parameters}));
        };
        command(
            "Emulation.setDeviceMetricsOverride",
            json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false}),
        );
        command(
            "Emulation.setEmulatedMedia",
            json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]}),
        );
    }

    /// What is seen, as a PNG in the folder for such files of this build.
    pub(crate) fn picture(&self, name: &str) {
        let (_, answer) = request("GET", &format!("{}/screenshot", self.session), None).unwrap();
        let answer: Value = serde_json::from_str(&answer).unwrap();
        let path = format!("{}/dashboard-{name}.png", env!("CARGO_TARGET_TMPDIR"));
        std::fs::write(&path, base64(answer["value"].as_str().unwrap())).unwrap();
        println!("{path}");
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // It closes the browser.
        if !self.session.is_empty() {
            let _ = request("DELETE", &self.session, None);
        }
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}

fn base64(text: &str) -> Vec<u8> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => Some(c - b'A'),
        b'a'..=b'z' => Some(c - b'a' + 26),
        b'0'..=b'9' => Some(c - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let digits: Vec<u8> = text.bytes().filter_map(digit).collect();
    let bytes = digits.chunks(4).flat_map(|four| {
        let bits = four.iter().fold(0u32, |bits, d| bits << 6 | u32::from(*d));
        let bits = bits << (6 * (4 - four.len()));
        bits.to_be_bytes()[1..four.len()].to_vec()
    });
    bytes.collect()
}

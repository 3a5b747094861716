//! The dashboard of a job whose replica dies and heals, clicked through.

use oxccl::coordination::{LighthouseClient, LighthouseServer};
use serde_json::{Value, json};

use crate::browser::{Browser, free_port};
use crate::http::{get, soon, wait_until};
use crate::job::{Job, lighthouse};

/// As `oxccl why` has it. The times in it pass: they are left out.
fn why(lighthouse: &LighthouseServer) -> String {
    let client = LighthouseClient::connect(&lighthouse.address(), soon()).unwrap();
    without_times(&client.status(soon()).unwrap().explain().text)
}

fn without_times(text: &str) -> String {
    text.chars()
        .filter(|c| !c.is_ascii_digit() && *c != '.')
        .collect()
}

const STEP: &str = "return Number([...document.querySelectorAll('#tiles div')].find(t => t.innerText.startsWith('step')).querySelector('dd').innerText)";

#[test]
fn the_dashboard_follows_a_job_through_death_and_heal_without_polling_or_network() {
    let bind = format!("127.0.0.1:{}", free_port());
    let server = lighthouse(&bind);
    let browser = Browser::start();
    browser.open(&server.address());
    // Before any quorum: the product's name, the verdict of `oxccl why`, and no number that belongs to no quorum.
    browser.wait(
        "the first event",
        "return document.querySelector('#state').innerText === 'live'",
    );
    assert!(
        browser
            .run("return document.title")
            .as_str()
            .unwrap()
            .contains("oxccl")
    );
    let body = browser.text("body");
    assert!(
        body.contains("oxccl lighthouse") && body.contains("no quorum yet"),
        "{body}"
    );
    assert_eq!(
        browser.run(r"return /\d{13}/.test(document.documentElement.outerHTML)"),
        json!(false),
        "{body}"
    );
    assert_eq!(without_times(&browser.text("#text")), why(&server));
    assert!(browser.text("#frees").contains("start the replicas"), "{body}");

    let mut job = Job::new(&server);
    job.start("a");
    // One of two: the verdict changes, and says what would free the job.
    browser.wait(
        "it says that one replica waits",
        "return document.querySelector('#text').innerText.startsWith('1 replica waits for a quorum') && document.querySelector('#why').classList.contains('stuck')",
    );
    assert_eq!(without_times(&browser.text("#text")), why(&server));
    job.start("b");
    browser.wait(
        "both replicas have a throughput",
        "return [...document.querySelectorAll('#replicas tr')].filter(tr => Number(tr.children[2].innerText) > 0).length === 2",
    );
    browser.wait(
        "nothing is stuck",
        "return document.querySelector('#text').innerText.startsWith('nothing is stuck')",
    );
    assert!(
        browser.text("#moments").contains("2 members at step"),
        "{}",
        browser.text("#moments")
    );

    // A death, and the heal from the survivor.
    job.kill("b");
    browser.wait(
        "the timeline has the death",
        "return !!document.querySelector('#drawing path.gone') && document.querySelector('#moments .gone')?.innerText.includes('b:') === true",
    );
    job.start("b");
    browser.wait(
        "the timeline has the heal and its source",
        r"return !!document.querySelector('#drawing path.heal') && /b:\w+ heals from a:\w+ \(step \d+/.test(document.querySelector('#moments .heal')?.innerText ?? '')",
    );

    // A click holds the picture still while events come, and another one lets it go on.
    browser.click("#pause");
    let (held, heard) = (browser.run(STEP), "return last.status.participants[0].step");
    let before = browser.run(heard).as_i64().unwrap();
    wait_until("events come meanwhile", || {
        (browser.run(heard).as_i64().unwrap() > before).then_some(())
    });
    assert_eq!(browser.run(STEP), held);
    browser.click("#pause");
    let later = browser.run(STEP).as_i64().unwrap();
    assert!(later > held.as_i64().unwrap(), "{later} after {held}");

    // One request for the page, one for all that came since, and nothing from elsewhere.
    let asked = browser.run("return performance.getEntries().filter(e => e.entryType === 'navigation' || e.entryType === 'resource').map(e => e.name)");
    let asked: Vec<&str> = asked
        .as_array()
        .unwrap()
        .iter()
        .filter_map(Value::as_str)
        .collect();
    let own = |name: &&str| name.starts_with(&server.address()) || name.starts_with("data:");
    assert!(asked.iter().all(own), "{asked:?}");
    assert!(
        asked.iter().filter(|name| !name.ends_with("/events")).count() <= 2,
        "it polls: {asked:?}"
    );

    for (name, width, height, scheme) in [
        ("wide-light", 1100, 680, "light"),
        ("wide-dark", 1100, 680, "dark"),
        ("narrow-light", 400, 1150, "light"),
        ("narrow-dark", 400, 1150, "dark"),
    ] {
        browser.screen(width, height, scheme);
        browser.wait(
            "the picture fits the screen",
            &format!("return document.documentElement.scrollWidth <= {width} && document.querySelector('#drawing').viewBox.baseVal.width < {width}"),
        );
        // WCAG's contrast of text, of all that is shown.
        let worst = browser.run(CONTRAST);
        let (ratio, of) = (worst[0].as_f64().unwrap(), worst[1].as_str().unwrap_or_default());
        assert!(ratio >= 4.5, "{name}: the contrast of '{of}' is {ratio}");
        let light = browser.run(
            "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).reduce((sum, c) => sum + Number(c), 0)",
        );
        let is_dark = light.as_i64().unwrap() < 3 * 64;
        assert_eq!(is_dark, scheme == "dark", "{name}: {light} of 765");
        browser.picture(name);
    }

    // A lighthouse that ends is said so, and the page comes back with the next one.
    drop(job);
    drop(server);
    browser.wait(
        "the page says that nothing answers",
        "return document.querySelector('#state').classList.contains('lost')",
    );
    let server = wait_until("the port is free", || {
        std::panic::catch_unwind(|| lighthouse(&bind)).ok()
    });
    browser.wait(
        "the page is live again",
        "return document.querySelector('#state').innerText === 'live'",
    );
    assert_eq!(without_times(&browser.text("#text")), why(&server));
    // It was the only dashboard: once it is closed nothing is made for it any more.
    drop(browser);
    wait_until("no dashboard is open", || {
        let text = get(&format!("{}/metrics", server.address()));
        text.lines()
            .any(|l| l == "oxccl_lighthouse_listeners 0")
            .then_some(())
    });
}

/// The least contrast of a text with what is behind it, and the text.
const CONTRAST: &str = "
const numbers = c => c.match(/[\\d.]+/g).map(Number);
const light = c => { const [r, g, b] = numbers(c).map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (numbers(c)[3] !== 0) return c; } return 'rgb(255, 255, 255)'; };
let worst = [99, ''];
for (const e of document.body.querySelectorAll('*')) {
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
  if (!own || !e.getClientRects().length || e.tagName === 'SCRIPT' || e.tagName === 'title') continue;
  const style = getComputedStyle(e), a = light(e.namespaceURI.endsWith('svg') ? style.fill : style.color), b = light(behind(e));
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < worst[0]) worst = [ratio, e.textContent];
}
return worst;";

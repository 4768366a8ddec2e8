//! The top of every front, shard and control thread: what unwinds through it ends the process.
//!
//! Lives on: the thread it guards. Bound: one per thread.
//!
//! A broken invariant of ours must not leave half a machine running: leases are fenced by the
//! process's death, and a supervisor starts a new one. `[D-47]`
use std::cell::Cell;
use std::panic;
use std::sync::Once;

thread_local! {
    /// This thread is inside `abort_on_unwind`.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work`; a panic in it aborts the process after the panic's own message was printed, before
/// anything is unwound: what a runtime does while it unwinds may never end.
///
/// Called once per thread, as the outermost function. It never returns by unwinding.
pub fn abort_on_unwind<R>(work: impl FnOnce() -> R) -> R {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            print(info);
            if GUARDED.try_with(Cell::get).unwrap_or(false) {
                end();
            }
        }));
    });
    /// For a panic whose hook somebody replaced since.
    struct Guard;
    impl Drop for Guard {
        fn drop(&mut self) {
            end();
        }
    }
    let guard = Guard;
    let outer = GUARDED.replace(true);
    let result = work();
    GUARDED.set(outer);
    core::mem::forget(guard); // no unwinding happened
    result
}

fn end() {
    std::process::abort()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    const CHILD: &str = "IOP_TEST_GUARD_CHILD";

    /// What unwinding would run: it must not get that far.
    struct EndsWell;

    impl Drop for EndsWell {
        fn drop(&mut self) {
            std::process::exit(0)
        }
    }

    /// The guarded thread's panic ends the whole process by SIGABRT, its message printed first, and
    /// nothing unwound; work that returns is returned. Proves [D-47].
    #[test]
    fn d47_a_panic_under_the_guard_ends_the_process() {
        if std::env::var_os(CHILD).is_some() {
            let thread = std::thread::spawn(|| {
                abort_on_unwind(|| {
                    let _unwinding = EndsWell;
                    panic!("planted panic")
                })
            });
            let _ = thread.join();
            return; // reached only when the guard is broken: the child then succeeds
        }
        assert_eq!(abort_on_unwind(|| 7), 7);
        let this = std::env::current_exe().expect("a test has an executable");
        let child = Command::new(this)
            .args([
                "--exact",
                "--nocapture",
                "guard::tests::d47_a_panic_under_the_guard_ends_the_process",
            ])
            .env(CHILD, "1")
            .output()
            .expect("the test binary starts");
        let text = String::from_utf8_lossy(&child.stderr);
        assert_eq!(
            child.status.signal(),
            Some(libc::SIGABRT),
            "{:?} {text}",
            child.status
        );
        assert!(text.contains("planted panic"), "{text}");
    }
}

"""The reward kind judge, at a fake server: scores, failures that are never 0, and what is asked."""

import asyncio
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from meshrl.config.reward import RewardConfig, RewardTerm
from meshrl.core.errors import ConfigError, Failure, RewardError
from meshrl.core.types import Prompt
from meshrl.reward.judge import judge
from meshrl.reward.kinds import make_grader
from meshrl.reward.score import Scorer
from meshrl.reward.self_test import _attempt, try_built_in

PROMPT = {"messages": [{"role": "user", "content": "What is 2+2?"}]}


@contextmanager
def judge_server(answer):
    """(url, requests): answer(text of the question, number of requests so far) -> text, or a status."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        log_message = print  # in place of stderr

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            requests.append({**body, "path": self.path, "key": self.headers["authorization"]})
            reply = answer(body["messages"][0]["content"], len(requests))
            self.send_response(200 if isinstance(reply, str) else reply)
            self.send_header("retry-after", "1")
            self.end_headers()
            choice = {"message": {"content": reply}, "finish_reason": "length" if reply == "Score: 9, as" else "stop"}
            self.wfile.write(json.dumps({"choices": [choice]}).encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1", requests
        server.shutdown()


def scores(url, *texts, answer="4", **args):
    """The judge's scores of these completions, which are graded together in this process."""

    async def run():
        return await asyncio.gather(*(judge(t, answer, prompt=PROMPT, url=url, model="m", **args) for t in texts))

    return asyncio.run(run())


def with_worker(*texts, timeout_s=20.0, **args):
    """(The notes of the self-test, the results of these completions in a worker)."""
    cfg = RewardConfig(terms={"quality": RewardTerm(kind="judge", args={"model": "m", **args})}, timeout_s=timeout_s)
    notes, prompt = [], Prompt(id="p", ordinal=0, **PROMPT)

    async def run():
        scorer = Scorer(cfg)
        try:
            if not texts:
                await try_built_in(scorer, cfg.terms, notes.append)
            return notes, await scorer.grade([("quality", _attempt(prompt, text)) for text in texts])
        finally:
            await scorer.close()

    return asyncio.run(run())


def test_answers_are_graded_with_the_key_and_equal_questions_are_asked_once(monkeypatch):
    monkeypatch.setenv("MY_JUDGE_KEY", "secret\n")  # as in a file
    args = {"api_key_env": "MY_JUDGE_KEY", "extra_body": {"max_tokens": None, "max_completion_tokens": 9}}
    with judge_server(lambda text, n: f"Not bad.\n**Score:** {8 if 'good' in text else 2}/10") as (url, requests):
        assert scores(url, "good", "bad", "good", **args) + scores(url, "bad", **args) == [0.8, 0.2, 0.8, 0.2]
    (message,), sent = requests[0].pop("messages"), {"model": "m", "temperature": 0, "max_completion_tokens": 9}
    assert message["content"].startswith("Task:\nWhat is 2+2?\n\nReference answer, which is right:\n4\n")
    assert requests[0] == sent | {"path": "/v1/chat/completions", "key": "Bearer secret"} and len(requests) == 2


def test_the_score_is_the_mean_of_the_votes_with_a_users_template_regex_and_scale():
    with judge_server(lambda text, n: f"{text} grade {n}") as (url, requests):
        args = {"template": "{{{completion}}}", "regex": "grade ([0-9])", "scale": [1, 3]}
        assert scores(url, "x", votes=3, temperature=0.5, **args) == [0.5]
    assert [r["messages"][0]["content"] for r in requests] == ["{x}"] * 3


def test_what_can_not_be_read_is_a_failure_with_the_reason_and_no_score():
    replies = {"ok": "7", "no": "hm", "above": "Score: 11", "long": "Score: 9, as", "refused": 401, "slow": "9"}
    ended = threading.Event()
    with judge_server(lambda text, n: replies[text] if text != "slow" or ended.wait(20) else "") as (url, requests):
        _, results = with_worker(*replies, url=url, template="{completion}", timeout_s=2.0)
        ended.set()
    assert [r.kind if isinstance(r, Failure) else r for r in results] == [0.7, *["judge"] * 4, "timeout"]
    reasons = ("no score from 0 to 10", "'Score: 11'", "finish_reason length", "status 401")
    assert all(reason in result.message for reason, result in zip(reasons, results[1:]))
    assert len(requests) == len(replies)


def test_a_question_that_can_not_be_asked_states_why():
    for message, args in {
        "http://127.0.0.1:9/chat/completions, request 1 of at most 1: no answer": {"max_tries": 1},
        "environment variable NO_SUCH_KEY": {"api_key_env": "NO_SUCH_KEY"},
        "set data.answer": {"template": "{completion}{answer}"},
    }.items():
        with pytest.raises(RewardError, match=message):
            scores("http://127.0.0.1:9", "x", answer=None, **args)


def test_a_key_that_can_not_be_sent_stands_in_no_error(monkeypatch, capsys):
    monkeypatch.setenv("MY_JUDGE_KEY", "sec\nret")
    with pytest.raises(RewardError, match=r"MY_JUDGE_KEY .api_key_env. has other characters") as error:
        scores("http://127.0.0.1:9", "x", api_key_env="MY_JUDGE_KEY")
    assert "ret" not in str(error.value).replace("characters", "") and "sec" not in capsys.readouterr().out


def test_a_request_is_repeated_after_429_and_no_more_often_than_allowed():
    with judge_server(lambda text, n: "Score: 5" if n == 2 else 429) as (url, requests):
        started_at = time.monotonic()
        assert scores(url, "x") == [0.5] and time.monotonic() - started_at >= 1.0
        with pytest.raises(RewardError, match="request 2 of at most 2: status 429"):
            scores(url, "y", max_tries=2)
    assert len(requests) == 4


@pytest.mark.parametrize(("args", "most"), [({}, 8), ({"max_parallel": 2, "timeout_s": 2.0}, 2)])
def test_questions_wait_together_up_to_max_parallel_and_the_time_of_each_starts_with_its_call(args, most):
    barrier, running, seen = threading.Barrier(most), [], []

    def answer(text, number):
        running.append(text)
        barrier.wait(20)
        seen.append(len(running))
        time.sleep(0.6)  # 4 rounds of 2 take longer than the time limit
        running.remove(text)
        return "Score: 10"

    with judge_server(answer) as (url, _):
        assert with_worker(*"abcdefgh", url=url, **args)[1] == [1.0] * 8
    assert max(seen) == most


def test_arguments_that_can_not_work_are_refused_before_the_run():
    for message, args in {
        "url is 'judge:8000'; it must be an address such as http://": {"url": "judge:8000"},
        "a text with {completion}; in braces only .*'low', 'high'": {"template": "{completion} {anser}"},
        "one with a group for the number": {"regex": "Score"},
        "the lowest and the highest score": {"scale": [10, 0]},
        "an address without a password": {"url": "http://me:secret@localhost/v1"},
        "votes is 0; it must be 1, 2, 3 ...": {"votes": 0},
        "max_parallel is 65; it must be at most 64": {"max_parallel": 65},
        "temperature is 0.0; it must be above 0": {"votes": 3},
        "0 to 1, with a calibration": {"min_agreement": 0.7},
        "no argument 'api_key'; allowed": {"api_key": "secret"},
    }.items():
        with pytest.raises(ConfigError, match=message):
            make_grader("quality", "judge", {"url": "http://localhost/v1", "model": "m", **args})


def test_a_judge_is_compared_with_labelled_rows_at_the_start(tmp_path):
    rows = [{"prompt": "Add.", "completion": f"good={i}", "score" if i else "label": i} for i in range(3)]
    (file := tmp_path / "graded.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with judge_server(lambda text, n: f"Score: {2 if 'good=2' in text else 1}") as (url, _):
        args = {"url": url, "calibration": str(file)}
        ((note,), _) = with_worker(min_agreement=0.8, **args)
        assert "graded 3 of 3 rows" in note and "ordered 83% of 3 pairs" in note
        assert note.endswith(f"(by chance: 50%); it scored {file}:2 0.1, and {file}:1 0.1")
        with pytest.raises(ConfigError, match=r"ordered 83% of 3 pairs .*min_agreement is 0\.9"):
            with_worker(min_agreement=0.9, **args)
        file.write_text('{"prompt": "p", "completion": "c"}')
        with pytest.raises(ConfigError, match=r"graded.jsonl:1: KeyError: 'label'; each line"):
            with_worker(**args)
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError, match=r"graded none of the 3 rows of .*no answer, ConnectError: .*\)$"):
        with_worker(max_tries=1, **args)
    with pytest.raises(ConfigError, match=r"could not grade '4': judge: http://.* no answer"):
        with_worker(url=url, max_tries=1)

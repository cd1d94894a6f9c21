def test_a_job_goes_in_and_out(queue):
    job_id = queue.enqueue({"n": 1})
    job = queue.claim_one("w")
    assert (job.id, job.payload) == (job_id, {"n": 1})
    assert job.ack()

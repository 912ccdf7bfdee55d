/* The calls to the MPI, once for each width that its handles have; included by rounds.c with HANDLE and NAME defined. */

typedef int NAME(message_function)(void *, int, HANDLE, int, int, HANDLE, HANDLE *); /* Isend, Irecv, their _init */
typedef int NAME(test_function)(int, HANDLE *, int *, void *);
typedef int NAME(start_function)(int, HANDLE *);
typedef int NAME(handle_function)(HANDLE *); /* Type_commit, Type_free, Request_free */
typedef int NAME(scatter_function)(int, const int *, const intptr_t *, HANDLE, HANDLE *);

static int NAME(release)(HANDLE *handle, enum pr_mpi_function function)
{
    return ((NAME(handle_function) *)mpi.functions[function])(handle);
}

/* Begin a message, or with an _init function prepare it. What lies in several pieces goes as one derived datatype, which
 * the MPI keeps until the message has gone. */
static int NAME(post)(struct pr_run *run, const struct message *m, enum pr_mpi_function function, int slot)
{
    NAME(message_function) *post = (NAME(message_function) *)mpi.functions[function];
    HANDLE *request = (HANDLE *)run->requests + slot, comm = (HANDLE)run->comm, type = (HANDLE)mpi.byte;
    uintptr_t base = run->bases[m->space];
    if (m->pieces == 0)
        return post(NULL, 0, type, m->peer, run->tag, comm, request);
    if (m->pieces == 1)
        return post((void *)(base + (uintptr_t)m->at[0]), (int)m->at[1], type, m->peer, run->tag, comm, request);
    int *lengths = malloc((size_t)m->pieces * sizeof *lengths);
    intptr_t *addresses = malloc((size_t)m->pieces * sizeof *addresses);
    int code = MPI_ERR_NO_ROOM;
    if (lengths && addresses) {
        for (int i = 0; i < m->pieces; i++) {
            addresses[i] = (intptr_t)(base + (uintptr_t)m->at[2 * i]);
            lengths[i] = (int)m->at[2 * i + 1];
        }
        HANDLE scattered;
        NAME(scatter_function) *scatter = (NAME(scatter_function) *)mpi.functions[PR_MPI_TYPE_CREATE_HINDEXED];
        code = scatter(m->pieces, lengths, addresses, type, &scattered);
        if (code == 0)
            code = NAME(release)(&scattered, PR_MPI_TYPE_COMMIT);
        if (code == 0)
            code = post(NULL, 1, scattered, m->peer, run->tag, comm, request); /* NULL: MPI_BOTTOM */
        if (code == 0)
            code = NAME(release)(&scattered, PR_MPI_TYPE_FREE);
    }
    free(lengths);
    free(addresses);
    return code;
}

static int NAME(test)(struct pr_run *run, int first, int count, int *done)
{
    return ((NAME(test_function) *)mpi.functions[PR_MPI_TESTALL])(count, (HANDLE *)run->requests + first, done,
                                                                  run->statuses);
}

static int NAME(start)(struct pr_run *run, int first, int count)
{
    return ((NAME(start_function) *)mpi.functions[PR_MPI_STARTALL])(count, (HANDLE *)run->requests + first);
}

static int NAME(give_back)(struct pr_run *run, int prepared)
{
    for (int i = 0; i < prepared; i++) {
        int code = NAME(release)((HANDLE *)run->requests + i, PR_MPI_REQUEST_FREE);
        if (code != 0)
            return code;
    }
    return 0;
}

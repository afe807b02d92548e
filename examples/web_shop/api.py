"""The web shop: uvicorn api:app"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from pydantic import BaseModel, Field
from sqlalchemy import create_engine, func, select
from sqlalchemy.orm import Session

from keylane.outbox import Outbox
from shop import CODEC, DATABASE_URL, META, Bill, place_order

engine = create_engine(DATABASE_URL)
outbox = Outbox(META, engine, codec=CODEC)


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    async with outbox:  # while it is open, this process sends what is committed
        yield


app = FastAPI(lifespan=lifespan)


class NewOrder(BaseModel):
    customer: str
    cents: int = Field(ge=0)


@app.post("/orders", status_code=201)
def post_order(new: NewOrder) -> dict[str, int]:
    with Session(engine) as session, session.begin():
        return {"id": place_order(session, outbox, new.customer, new.cents)}


@app.get("/customers/{customer}/bills")
def get_bills(customer: str) -> dict[str, int]:
    bills = select(func.count(), func.coalesce(func.sum(Bill.cents), 0))
    with Session(engine) as session:
        count, cents = session.execute(bills.where(Bill.customer == customer)).one()
    return {"count": count, "cents": cents}
